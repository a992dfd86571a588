"""The time limits of a job: how long it may take, stand still, and wait for its last ranks. The coordinator carries
out what is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.failure import Failure
from ddplaunch.control.inspections import JobInspections
from ddplaunch.control.messages import Debugged, FromNode, Progress, RanksStarted, Stalled, Straggling, Suspicion
from ddplaunch.control.rules import LONG_WAIT, SOON
from ddplaunch.control.seat import Part, Seats
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_TIMEOUT
from ddplaunch.loop import Timer
from ddplaunch.words import ranks, span

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Inspection
    from ddplaunch.diagnosis.stall import Stall


REST = 2.0  # seconds between two questions whether the job has stalled, at most
_UNUSUAL = 10.0  # times the usual gap between two collectives
_RAISED = 3.0  # times what a wait had lasted when it was reported, for the next one at the same place
IF_AT_WORK = "if that was work, use a larger --stall-timeout, or call ddplaunch.runtime.working() meanwhile"


@dataclass(frozen=True)
class Cut:
    """Why an attempt is stopped though no rank has failed."""

    text: str  # for people
    failure: Failure | None  # of the rank that the others waited for; None where none is to blame
    lives: bool = False  # whether that rank had not ended by itself
    restarts: bool = False  # whether the job may start again
    inspection: Inspection | None = None  # what all ranks were doing, where that is known already


class TimeLimits:
    """The time limits of one job."""

    def __init__(
        self,
        run_id: str,
        seats: Seats,
        inspections: JobInspections,
        after: Callable[[float, Callable[[], None]], Timer],
        cut: Callable[[Cut], None],
        clock: Callable[[], float],
    ) -> None:
        """``after`` and ``clock`` are the loop's; ``cut`` stops the attempt, if ranks run."""
        self._rules, self._run_id, self._seats = seats.rules, run_id, seats
        self._inspections, self._after, self._cut = inspections, after, cut
        self.over = False  # whether the time of the job is
        self._attempt = -1
        self._ran = False  # whether a rank has
        self._asking = False  # or resting from that
        self._suspected = False  # meanwhile
        self._reported: tuple[object, ...] = ()
        self._stalled = False  # as far as anybody was told
        self._usual: dict[str, float] = {}  # seconds for which ranks wait at a place before that is worth a word
        self._straggling: set[int] = set()  # the nodes whose ranks do, to their knowledge
        self._timers: dict[str, Timer] = {}
        self._job_timer: Timer | None = None
        self._left = self._rules.timeout  # seconds of the job's time, when its timer was set last: then
        self._clock, self._set_at = clock, clock()
        self._debugging: set[int] = set()  # the nodes with a rank in a debugger

    def begin(self, attempt: int) -> None:
        """An attempt starts."""
        if self._attempt < 0:
            self._run_job_timer()  # also where no rank ever starts
        self._attempt = attempt
        self._asking = self._suspected = self._stalled = False
        self._reported = ()
        self._usual.clear()
        self._straggling.clear()
        for node in list(self._debugging):
            self.debugged(node, busy=False)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def take(self, node: int, message: FromNode) -> None:
        """Take in what a node reports of its ranks in this attempt."""
        match message:
            case RanksStarted():
                self.started()
            case Suspicion():
                self.suspect()
            case Progress():
                self.progressed()
            case Straggling():
                self.straggles(node)
            case Debugged(busy=busy):
                self.debugged(node, busy=busy)

    def started(self) -> None:
        """The first rank of a node runs."""
        if not self._ran:
            self._ran = True
            self._left = self._rules.timeout
            self._run_job_timer()

    def _run_job_timer(self) -> None:
        if self._job_timer is not None:
            self._job_timer.cancel()
        if self._left is not None and not self.over and not self._debugging:
            self._set_at = self._clock()
            self._job_timer = self._after(self._left, self._job_over)

    def debugged(self, node: int, *, busy: bool) -> None:
        """A rank of this node is in a debugger, or none is any more: meanwhile no time limit runs."""
        before = bool(self._debugging)
        (self._debugging.add if busy else self._debugging.discard)(node)
        if before == bool(self._debugging):
            return
        if self._debugging:
            self._seats.tell_all(Stalled(time.time(), ""))
        else:
            self._stalled = False
            self._seats.tell_all(Progress(self._attempt))
        if self._debugging and self._job_timer is not None and self._left is not None:
            self._job_timer.cancel()
            self._left = max(0.0, self._left - (self._clock() - self._set_at))
        elif not self._debugging:
            self._run_job_timer()

    def end(self) -> None:
        """The job is over."""
        self.begin(self._attempt)
        if self._job_timer is not None:
            self._job_timer.cancel()

    def _job_over(self) -> None:
        self.over = True
        self._cut(Cut(f"{span(self._rules.timeout or 0)} have passed (--timeout)", None))

    def _set(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Set one of the timers of an attempt, which each replace the one of the same name."""
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._after(seconds, callback)

    # ------------------------------------------------------------------------------------------------------- stalls

    def suspect(self) -> None:
        """A node's ranks do not get on: ask all nodes, but not once for each of them."""
        if self._asking:
            self._suspected = True
        else:
            self._ask_whether()

    def _ask_whether(self) -> None:
        self._asking, self._suspected = True, False
        attempt = self._attempt
        self._inspections.begin(diagnosis.inspection.Detail.WAITS, lambda inspection: self._judge(attempt, inspection))

    def _judge(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        rules = self._rules
        if self._debugging:
            self._set("asking", rules.stall_pause / 2, self._rested)
            return
        stall, sooner = diagnosis.stall.judge(inspection, rules.stall_timeout, strict=rules.stall_strict)
        if sooner is None:
            self._set("asking", min(rules.stall_pause / 2, REST), self._rested)
        else:
            self._set("asking", sooner, self._ask_whether)
        if stall is None:
            self._judge_early(attempt, inspection)
        elif rules.on_stall != "report" and stall.killable:
            found = diagnosis.culprit.culprit(inspection)
            what = found.text if found else stall.text
            hint = IF_AT_WORK if stall.lives and stall.idle else None
            failure = self._failure(inspection, stall.rank, "the job stalled", stall.trace, hint)
            text = f"no progress for {span(stall.seconds)} (--stall-timeout): {what}{self._on(failure)}"
            self._stands_still(stall, "")
            self._cut(Cut(text, failure, stall.lives, rules.on_stall == "restart", inspection))
        else:
            self._tell(stall)

    def _judge_early(self, attempt: int, inspection: Inspection) -> None:
        """Say which ranks wait, before the stall timeout is over, where that is unusual for this job and place."""
        stall, sooner = diagnosis.stall.judge(inspection, SOON, strict=False, noisy=LONG_WAIT)
        if sooner is not None:
            self._set("telling", sooner, self.suspect)
        if stall is None:
            return
        if stall.mark == self._reported:
            return self._tell(stall)

        def compare(inspection: Inspection) -> None:
            if attempt != self._attempt:
                return
            gap = diagnosis.pace.usual_gap(each for rank in inspection.ranks for each in rank.arrivals)
            usual = max(_UNUSUAL * gap, self._usual.get(stall.place, SOON))
            if stall.seconds >= usual:
                self._usual[stall.place] = _RAISED * stall.seconds
                self._tell(stall)
            elif usual < self._rules.stall_timeout:
                self._set("telling", usual - stall.seconds, self.suspect)

        self._inspections.begin(diagnosis.inspection.Detail.PACE, compare)

    def _tell(self, stall: Stall) -> None:
        """Say it to people once; where a rank has only printed something since, it is counted as it was before."""
        if stall.mark != self._reported:
            self._reported = stall.mark
            closer = f"look closer with `ddplaunch stacks {self._run_id}`"
            self._stands_still(stall, f"no progress for {span(stall.seconds)}: {stall.text}; {closer}")
        elif not self._stalled:
            self._stands_still(stall, "")

    def _stands_still(self, stall: Stall, text: str) -> None:
        self._stalled = True
        self._seats.tell_all(Stalled(time.time() - stall.seconds, text))

    def progressed(self) -> None:
        """A node says that its ranks, which had stalled, work again."""
        if self._stalled and not self._debugging:
            self._stalled = False
            self._seats.tell_all(Progress(self._attempt))

    def _rested(self) -> None:
        self._asking = False
        if self._suspected:
            self._ask_whether()

    # --------------------------------------------------------------------------------------------------- stragglers

    def finished(self) -> None:
        """All ranks of a node have done their work, those of others have not."""
        if self._rules.straggler_timeout is not None:
            self._set("stragglers", self._rules.straggler_timeout, self._inspect_stragglers)

    def straggles(self, node: int) -> None:
        """Some ranks of a node run on, long after the last of its others has ended."""
        self._straggling.add(node)
        self._inspect_stragglers()

    def _inspect_stragglers(self) -> None:
        attempt, detail = self._attempt, diagnosis.inspection.Detail.STACKS
        self._inspections.begin(detail, lambda inspection: self._judge_stragglers(attempt, inspection))

    def _judge_stragglers(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        if self._debugging:
            return self._set("stragglers", self._rules.straggler_timeout or 0.0, self._inspect_stragglers)
        working = [seat for seat in self._seats.values() if seat.part is Part.RUNNING]
        ours = {rank for seat in working for rank in seat.ranks}
        left = diagnosis.stall.stragglers(inspection, ours)
        recent = {rank for seat in working if seat.number not in self._straggling for rank in seat.ranks}
        if not left or (recent & ours) - {rank.rank for rank in left}:
            return  # some have ended there, lately: that node's own word comes
        trace, place = diagnosis.stall.trace(left[0]), diagnosis.stall.where(left)
        failure = self._failure(inspection, left[0].rank, "it ran on after the others had ended", trace)
        seconds = span(self._rules.straggler_timeout or 0)
        text = f"{ranks(rank.rank for rank in left)} ran on for {seconds} after the others had ended"
        text += " (--straggler-timeout)" + (f": {place}" if place else "") + self._on(failure)
        self._cut(Cut(text, failure, lives=True, inspection=inspection))

    def _on(self, failure: Failure) -> str:
        return f" (on {failure.host})" if self._rules.max_nodes > 1 else ""

    def _failure(
        self, inspection: Inspection, number: int, message: str, trace: str, hint: str | None = None
    ) -> Failure:
        """The failure of a rank that the others waited for."""
        rank = next(rank for rank in inspection.ranks if rank.rank == number)
        first = next((seat.ranks.start for seat in self._seats.values() if number in seat.ranks), number)
        return Failure(
            rank=number,
            local_rank=number - first,
            host=rank.host,
            pid=rank.pid,
            attempt=self._attempt,
            exit_code=EXIT_TIMEOUT,
            signal=None,
            message=message,
            traceback=f"it was at\n{trace}" if trace else None,
            moment=time.time(),
            hint=hint,
        )
