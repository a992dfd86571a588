"""Where a job stands; and of one attempt what has happened to its ranks so far, on all nodes together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from enum import Enum

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.failure import MAX_REPORT, Failure, Outcome, Verdict, judge, within
from ddplaunch.control.messages import Drained
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.errors import EXIT_TIMEOUT

if TYPE_CHECKING:
    from ddplaunch.control.seat import Seat
    from ddplaunch.control.time_limits import Cut
    from ddplaunch.diagnosis.inspection import Inspection

SETTLE = 1.0  # seconds that a rank which only lost a peer waits for the peer's own, truer, failure
HANGS = 10.0  # seconds: ranks that have waited longer than this in a collective may have waited for ever
MAX_HEARD = 16 << 20  # characters that failures may bring as they come, from all nodes together


class Stage(Enum):
    """Where a job stands as a whole."""

    JOINING = "waiting for nodes"
    CHECKING = "every node looks at itself"
    RUNNING = "an attempt runs"
    STOPPING = "an attempt is being stopped"
    PAUSING = "waiting to start again"
    ENDED = "all is over"


NEXT_STAGE = {
    Stage.JOINING: {Stage.CHECKING, Stage.RUNNING, Stage.ENDED},
    Stage.CHECKING: {Stage.RUNNING, Stage.ENDED},
    Stage.RUNNING: {Stage.STOPPING, Stage.PAUSING, Stage.ENDED},
    Stage.STOPPING: {Stage.PAUSING, Stage.ENDED},
    Stage.PAUSING: {Stage.CHECKING, Stage.RUNNING, Stage.ENDED},
    Stage.ENDED: set[Stage](),
}

BEFORE_RANKS = {Stage.JOINING, Stage.CHECKING, Stage.PAUSING}
"""Where no rank runs."""


@dataclass(frozen=True)
class Loss:
    """A node that was lost, or has left, while it took part; or one whose own processes were lost."""

    moment: float
    node: int  # its node rank, as typed
    host: str
    text: str
    left: bool = False  # whether a signal has taken it away: its ranks may have received that signal too, and before us

    def came_before(self, verdict: Verdict | None) -> bool:
        """Whether this is the cause of what failed: we may not know the exception that it causes elsewhere."""
        if verdict is None or verdict.first.is_consequence:
            return True
        unsure = self.left if verdict.first.host == self.host else verdict.first.message is not None
        return verdict.first.moment > self.moment - (SETTLE if unsure else 0.0)


@dataclass
class JobAttempt:
    """What has happened to it so far."""

    number: int = -1  # 0 is the first, -1 none yet
    world_size: int = 0
    began: float = 0.0  # on the coordinator's clock
    working: set[int] = field(default_factory=set)  # the nodes whose ranks have not done their work yet
    undrained: set[int] = field(default_factory=set)  # those that have something left of it
    failures: list[Failure] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)
    stopped: int = 0  # how many ranks ended because they were stopped
    broken: Loss | None = None  # what happened first to a launcher's own processes
    growing: bool = False  # whether it is stopped to take a node in, or to let one leave
    inspecting: bool = False  # whether the ranks are being inspected, before any is stopped
    after_inspection: list[Callable[[], object]] = field(default_factory=list)  # what is to follow on that
    inspection: Inspection | None = None  # what they were doing then
    cut: Cut | None = None  # the time limit that stopped it
    heard: int = 0  # characters of the failures' texts, as they came

    def gone(self, node: int) -> None:
        """Nothing of the attempt is left there; the sets spare N² comparisons of all nodes."""
        self.working.discard(node)
        self.undrained.discard(node)

    def leaves(self, seat: Seat) -> None:
        """A node with ranks is to leave."""
        self.lost.append(Loss(time.time(), seat.number, seat.host, seat.has_left, left=True))
        self.growing = True

    def failed(self, failure: Failure, clock: float) -> None:
        """A rank has failed; its texts are kept whole until those of all ranks are too long."""
        self.heard += failure.length
        self._keep(within([failure], failure.length if self.heard < MAX_HEARD else 0), clock)

    def drained(self, node: int, message: Drained) -> None:
        """A node's last message of the attempt; it has the failures once more, with all their details."""
        self.gone(node)
        ranks = {each.rank for each in message.failures}
        self.failures = [each for each in self.failures if each.rank not in ranks]
        self._keep(within(message.failures, MAX_REPORT), message.clock)
        self.stopped += message.stopped

    def _keep(self, failures: Iterable[Failure], clock: float) -> None:
        self.failures += [replace(each, moment=on_our_clock(each.moment, clock)) for each in failures]

    def broke(self, message: Drained, seat: Seat, at: str) -> None:
        """The processes of a launcher were lost there; ``at`` says where to people."""
        assert message.broken is not None
        moment = on_our_clock(message.broken.moment, message.clock)
        if self.broken is None or moment < self.broken.moment:
            self.broken = Loss(moment, seat.number, seat.host, message.broken.how + at)

    @property
    def broken_first(self) -> Loss | None:
        """What was lost of a launcher's own processes, where no rank had failed before."""
        return self.broken if self.broken and self.broken.came_before(self.verdict) else None

    @property
    def cause(self) -> Loss | None:
        """The node that was lost or has left first, where no rank had failed before."""
        return self.lost[0] if self.lost and self.lost[0].came_before(self.verdict) else None

    @property
    def verdict(self) -> Verdict | None:
        """Which failure came first, and what it brought about; None where no rank failed."""
        if self.cut is not None and self.cut.failure is not None:
            first = self.cut.failure
            others = tuple(each for each in self.failures if each.rank != first.rank)
            stopped = self.stopped - (self.cut.lives and len(others) == len(self.failures))
            stopped = min(
                stopped, self.world_size - 1 - len(others)
            )  # its process may live on though its program ended
            return Verdict(first, (), tuple(within(others, MAX_REPORT)), stopped, self.world_size, self.cut.text)
        if not self.failures:
            return None
        verdict = judge(self.failures, self.stopped, self.world_size)
        if self.inspection is None or not verdict.first.is_consequence:
            return verdict
        first, blame = verdict.first, self._waited_for()
        if not first.timed_out and (ended := diagnosis.culprit.ended_before(self.inspection, first.moment)):
            first = replace(first, hint="\n".join(filter(None, (first.hint, ended))))
        return replace(verdict, first=first, blame=blame)

    @property
    def outcome_of_cut(self) -> Outcome:
        """How a job ends that a time limit has stopped."""
        assert self.cut is not None
        if self.cut.failure is not None:
            return Outcome(EXIT_TIMEOUT, self.verdict)
        doing = diagnosis.stall.at_work(self.inspection) if self.inspection else ""
        return Outcome(EXIT_TIMEOUT, remark=f"{self.cut.text}: {doing}" if doing else self.cut.text)

    def _waited_for(self) -> str | None:
        """The rank that the others had waited for, where they only say that they waited."""
        if self.inspection is None:
            return None
        tracebacks = [(each.rank, each.traceback or each.message or "") for each in self.failures]
        timed_out = any(each.timed_out for each in self.failures)
        found = diagnosis.culprit.culprit(self.inspection, tracebacks, timed_out=timed_out, folder=os.getcwd())
        hosts = {each.rank: each.host for each in self.inspection.ranks}
        if found is None or len(set(hosts.values())) < 2 or found.ranks[0] not in hosts:
            return found.text if found else None
        return f"{found.text} (on {hosts[found.ranks[0]]})"

    @property
    def waits(self) -> str | None:
        """Who waited for whom when it was stopped, if that had lasted for long: somebody may have stopped a hang."""
        found = self.inspection
        if found is None:
            return None
        entered = [each.entered for rank in found.ranks for each in rank.last if not each.completed]
        # When send, recv and init_process_group began is not known: silence stands for that.
        quiet = {rank.rank: rank.quiet or 0.0 for rank in found.ranks}
        silent = [min(quiet[rank] for rank in wait.waiting) for wait in diagnosis.waits.waits(found) if not wait.number]
        if not any(lasted > HANGS for lasted in (*silent, *(found.moment - moment for moment in entered))):
            return None
        return f"when it was stopped: {'; '.join(diagnosis.sentences.sentences(found))}"

    @property
    def whole(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.failures or self.lost or self.broken or self.cut)


def on_our_clock(moment: float, clock: float) -> float:
    """Shift a moment by what another machine's clock, which shows ``clock`` now, is off: a message takes no time."""
    off = time.time() - clock
    return moment + off if abs(off) > SETTLE / 10 else moment
