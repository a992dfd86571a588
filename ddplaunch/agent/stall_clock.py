"""A node's clock that silence runs: once its ranks have long printed nothing, it inspects them, and may tell node 0.

Whatever a rank prints puts it back, at no cost and without a wake-up. It wakes the launcher after 20 s of silence, and
then each time that has doubled, up to the stall timeout; and once more where ranks wait for others, for what they do
meanwhile. Ranks that print all the time are looked at every 5 minutes. Whether the job has stalled is for node 0 to
say: it asks all nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.agent.ranks import Phase, Ranks
from ddplaunch.control.messages import FromNode, Progress, Suspicion
from ddplaunch.control.rules import LONG_WAIT, SOON, Rules
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.loop import Loop, Timer
from ddplaunch.output import events
from ddplaunch.output.isolation import IsolatedLoop

if TYPE_CHECKING:
    from ddplaunch.agent.usage import TreeUsage
    from ddplaunch.diagnosis.inspection import Inspection, RankInspection

PAUSE = 4.0  # seconds between two inspections, before the stall timeout
LATE = 2.0  # seconds: a wake-up that comes later was held up, as all of us were (Ctrl-Z, a frozen container)
SET = 1.0  # seconds that the wall clock may gain or lose between two readings; with more it was set, or we slept
NOISE = 0.02  # seconds of CPU time that a rank may use for our own questions, and the kernel's rounding

Inspect = Callable[["Ranks", Callable[["Inspection"], None]], None]


@dataclass(frozen=True)
class _Used:
    """What the ranks had used at one moment."""

    moment: float
    usage: dict[int, TreeUsage]  # by pid, ours already left out


class StallClock:
    """The stall clock of one node, from attempt to attempt."""

    def __init__(
        self,
        loop: Loop,
        rules: Rules,
        inspect: Inspect,
        tell: Callable[[FromNode], None],
        note: Callable[[str], None],
    ) -> None:
        """``inspect`` finds the state of ranks of this node; ``tell`` sends to the job; ``note`` shows a message."""
        self._loop, self._inspect, self._tell = IsolatedLoop(loop, "the stall clock", note), inspect, tell
        self._timeout, self._strict = rules.stall_timeout, rules.stall_strict
        doubled = [SOON * 2**times for times in range(10)]
        last = rules.stall_timeout - rules.stall_pause
        self._looks = [*((each, PAUSE) for each in doubled if each + PAUSE < last), (last, rules.stall_pause)]
        self._next = 0  # of these: after how much silence, and seconds until the second inspection
        self._ranks: Ranks | None = None
        self._timer: Timer | None = None
        self._printed: dict[int, float] = {}
        self._readings: list[_Used] = []  # the last two
        self._since: dict[int, tuple[object, float]] = {}  # the collectives of a rank, and since when they are these
        self._stuck = False  # whether ranks were, in the first inspection of two
        self._stalled = False  # whether node 0 has said that the job gets nowhere
        self._noisy = False  # whether ranks printed all the same, so that output is no progress
        self._inspected = 0.0
        self._long_look = 0.0  # when ranks that print all the time are looked at next
        self._offset = 0.0
        self._clock_set = 0.0  # the wall clock's time when it was last set
        guard = self._loop.guard  # an exception in here must not end the job
        self.begin: Callable[[Ranks], None] = guard(self._begin)
        self.restart: Callable[[], None] = guard(self._restart)
        self.printed: Callable[[int], None] = guard(self._on_printed)

    def _begin(self, ranks: Ranks) -> None:
        """A new attempt starts."""
        self.end()
        self._ranks = ranks
        self._offset = time.time() - time.monotonic()
        self._inspected = time.monotonic() - self._timeout
        self._long_look = time.monotonic() + LONG_WAIT / 2
        self._timer = self._loop.after(self._looks[0][0], self._wake)
        self._restart()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ranks = self._timer = None
        self._printed.clear()
        self._stalled = self._noisy = False

    def observe(self, event: events.Event) -> None:
        if isinstance(event, events.Stalled | events.WentOn):
            self._stalled = isinstance(event, events.Stalled)
            last = max(self._printed.values(), default=0.0)
            self._noisy = (
                self._stalled and time.monotonic() - last < min(SOON, self._timeout) / 2 and self._ranks is not None
            )
            if self._noisy:
                self._long_look = time.monotonic() + SOON

    def _restart(self) -> None:
        """Nothing counts that was before: we were stopped ourselves."""
        self._readings.clear()
        self._since.clear()
        if self._ranks is not None:
            for rank in self._ranks.plan.local_ranks:
                self._heard(rank.rank)

    def _on_printed(self, rank: int) -> None:
        self._heard(rank)
        if not self._noisy:
            self._goes_on()

    def _goes_on(self) -> None:
        """A rank has printed or come to another collective: whoever was told of a stall is told of this."""
        if self._stalled and self._ranks is not None:
            self._stalled = self._noisy = False
            self._tell(Progress(self._ranks.number))

    def _heard(self, rank: int) -> None:
        now = self._printed[rank] = time.monotonic()
        self._next, self._stuck = 0, False
        if self._timer is not None:
            quiet = max(now + self._looks[0][0], self._inspected + min(SOON, self._timeout))
            self._timer.when = max(now, min(quiet, self._long_look))

    def _silence(self, ranks: Ranks) -> float:
        """Seconds since a rank printed something, or said by ``runtime.working`` that it works."""
        for number, printed in self._printed.items():
            self._printed[number] = max(printed, ranks.worked(number))
        return time.monotonic() - max(self._printed.values(), default=0.0)

    def _wake(self) -> None:
        ranks, due = self._ranks, self._timer.when if self._timer else 0.0
        if ranks is None or ranks.phase not in (Phase.LOADING, Phase.RUNNING):
            return
        if time.monotonic() - due > max(LATE, self._looks[self._next][1]):
            self._restart()
            return self._again(self._looks[0][0])
        rest = self._looks[self._next][0] - self._silence(ranks)
        left = self._long_look - time.monotonic()
        if rest > 0 and left > 0:
            self._timer = self._loop.after(min(rest, left), self._wake)
            return
        for line in ranks.lines.values():
            line.catch_up()
        if not any(line.answers for line in ranks.lines.values()):
            return self._later(ranks)  # no rank has called init_process_group
        self._inspect(ranks, self._loop.guard(partial(self._found if rest <= 0 else self._found_noisy, ranks)))

    def _again(self, seconds: float) -> None:
        self._inspected = time.monotonic()
        self._long_look = self._inspected + (SOON if self._noisy else LONG_WAIT / 2)
        self._timer = self._loop.after(seconds, self._wake)

    def _later(self, ranks: Ranks) -> None:
        """Look again when the silence has doubled; with the stall timeout over, once in it."""
        self._stuck = False
        if self._next == len(self._looks) - 1:
            return self._again(self._timeout)
        self._next += 1
        self._again(max(0.0, self._looks[self._next][0] - self._silence(ranks)))

    def _found(self, ranks: Ranks, inspection: Inspection) -> None:
        if ranks is not self._ranks or ranks.phase is not Phase.RUNNING:
            return
        pause = self._looks[self._next][1]
        inspection = self._completed(inspection, ranks, keep=True)
        waiting = [rank for rank in inspection.ranks if self._may_wait(rank, ranks)]
        still = all((rank.standstill or 0.0) >= pause / 2 for rank in inspection.ranks)
        if not waiting and not (self._strict and self._next == len(self._looks) - 1):
            return self._later(ranks)
        if not self._stuck:  # nothing to compare with yet
            self._stuck = True
            return self._again(pause)
        if still and not any(diagnosis.stall.works(rank) for rank in inspection.ranks if rank not in waiting):
            self._tell(Suspicion(ranks.number))
        self._later(ranks)

    def _found_noisy(self, ranks: Ranks, inspection: Inspection) -> None:
        """Called when ranks that print were inspected: node 0 decides where one has waited for many minutes."""
        if ranks is not self._ranks or ranks.phase is not Phase.RUNNING:
            return
        inspection = self._completed(inspection, ranks, keep=True)
        waiting = [rank for rank in inspection.ranks if self._may_wait(rank, ranks)]
        working = max(map(ranks.worked, self._printed), default=0.0)  # by runtime.working, which is more than output
        long = any((rank.standstill or 0.0) >= LONG_WAIT / 2 - LATE for rank in waiting)
        if long and time.monotonic() - working > LONG_WAIT / 2:
            self._tell(Suspicion(ranks.number))
        self._again(self._looks[0][0])

    def _may_wait(self, rank: RankInspection, ranks: Ranks) -> bool:
        """Whether a rank waits for others, or is perhaps in ``init_process_group``."""
        begins = rank.answers is None and rank.rank in ranks.lines and ranks.lines[rank.rank].answers
        return begins or diagnosis.standing.may_wait(rank)

    # --------------------------------------------------------------------------------------- what this node alone knows

    def noting(self, ranks: Ranks | None, done: Callable[[Inspection], None]) -> Callable[[Inspection], None]:
        """Return a callback for an inspection that another part needs: it notes since when collectives are the same."""

        def note(inspection: Inspection) -> None:
            if ranks is not None and ranks is self._ranks:
                for rank in inspection.ranks:
                    self._standstill(rank, time.monotonic())

        def on_inspected(inspection: Inspection) -> None:
            self._loop.guard(note)(inspection)
            done(inspection)

        return on_inspected

    def complete(self, inspection: Inspection, ranks: Ranks) -> Inspection:
        """Add what this node knows; where that raises an exception the inspection is returned as it was."""
        found = [inspection]
        if ranks is self._ranks:
            self._loop.guard(lambda: found.append(self._completed(inspection, ranks)))()
        return found[-1]

    def _completed(self, inspection: Inspection, ranks: Ranks, *, keep: bool = False) -> Inspection:
        """Add how long ranks have been quiet and stood still, and what they have used, which ``keep`` keeps."""
        self._check_wall_clock()
        self._silence(ranks)
        moment = time.monotonic()
        apart = self._looks[0][1] / 2
        before = next((each for each in self._readings[::-1] if moment - each.moment > apart), None)
        # With thousands of sockets a reading takes long: people who ask do not wait for one that tells nothing.
        reading = self._read(ranks) if keep or before else _Used(moment, {})
        found = []
        for rank in inspection.ranks:
            printed = self._printed.get(rank.rank)
            quiet = None if printed is None else reading.moment - printed
            busy, traffic, network = _rates(rank.pid, before, reading)
            still = self._standstill(rank, reading.moment)
            found.append(replace(rank, quiet=quiet, standstill=still, busy=busy, traffic=traffic, network=network))
        if keep:
            self._readings = [*self._readings[-1:], reading]
        return replace(inspection, ranks=tuple(found))

    def _read(self, ranks: Ranks) -> _Used:
        """Read what the ranks have used, without the bytes of their answers to us."""
        from ddplaunch.agent.usage import usage

        taken = {
            process.pid: ranks.lines[rank].taken for rank, process in ranks.processes.items() if rank in ranks.lines
        }
        found = usage([process.pid for process in ranks.processes.values()], ranks.plan.master_port)
        ours = {pid: used._replace(moved=used.moved - taken.get(pid, 0)) for pid, used in found.items()}
        return _Used(time.monotonic(), ours)

    def _standstill(self, rank: RankInspection, now: float) -> float:
        """Seconds since its collectives are as they are: since we saw them so, or since it entered the last one."""
        known, since = self._since.setdefault(rank.rank, (rank.groups, now))
        if known != rank.groups and rank.answers is not False:  # one that does not answer may be where it was
            since = now
            self._since[rank.rank] = rank.groups, now
            self._goes_on()
        seen = now - since
        last = max((each.entered for each in rank.last), default=0.0)
        return max(seen, time.time() - last) if last > self._clock_set else seen

    def _check_wall_clock(self) -> None:
        offset = time.time() - time.monotonic()
        if abs(offset - self._offset) > SET:
            self._offset, self._clock_set = offset, time.time()


def _rates(pid: int, before: _Used | None, now: _Used) -> tuple[float | None, float | None, float | None]:
    """CPUs and bytes a second between two readings, in files and on the network; None where there are not two, or a
    process has gone unseen.
    """
    if before is None or pid not in now.usage:
        return None, None, None
    first, last = before.usage.get(pid), now.usage[pid]
    if first is None or last.cpu < first.cpu - NOISE:
        return None, None, None
    seconds = now.moment - before.moment
    network = sum(max(0, moved - first.network.get(each, 0)) for each, moved in last.network.items())
    used = max(0.0, last.cpu - first.cpu - NOISE), max(0, last.moved - first.moved), network
    return used[0] / seconds, used[1] / seconds, used[2] / seconds
