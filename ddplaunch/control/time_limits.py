"""The time limits of a job: how long it may take, stand still, and wait for its last ranks. The coordinator carries
out what is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.failure import RankFailure
from ddplaunch.control.inspections import JobInspections
from ddplaunch.control.messages import (
    DebuggerActive,
    FromNode,
    JobStalled,
    ProgressResumed,
    RanksStarted,
    StallSuspected,
    StragglersFound,
)
from ddplaunch.control.rules import EARLY_STALL_CHECK_S, LONG_WAIT
from ddplaunch.control.seat import NodePhase, NodeTable
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_TIMEOUT
from ddplaunch.loop import Timer
from ddplaunch.words import format_elapsed, format_ranks

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Inspection
    from ddplaunch.diagnosis.stall import Stall


STALL_CHECK_INTERVAL_S = 2.0  # seconds between two questions whether the job has stalled, at most
_UNUSUAL_WAIT_FACTOR = 10.0  # times the usual gap between two collectives
_REPEAT_WAIT_FACTOR = 3.0  # times what a wait had lasted when it was reported, for the next one at the same place
FALSE_STALL_HINT = "if that was work, use a larger --stall-timeout, or call ddplaunch.runtime.working() meanwhile"


@dataclass(frozen=True)
class TimeLimitExpired:
    """Why an attempt is stopped though no rank has failed."""

    reason: str  # for people
    failure: RankFailure | None  # of the rank that the others waited for; None where none is to blame
    rank_was_alive: bool = False  # whether that rank had not ended by itself
    may_restart: bool = False  # whether the job may start again
    inspection: Inspection | None = None  # what all ranks were doing, where that is known already


class TimeLimits:
    """The time limits of one job."""

    def __init__(
        self,
        run_id: str,
        seats: NodeTable,
        inspections: JobInspections,
        call_later: Callable[[float, Callable[[], None]], Timer],
        on_expired: Callable[[TimeLimitExpired], None],
        clock: Callable[[], float],
    ) -> None:
        """``call_later`` and ``clock`` are the loop's; ``on_expired`` stops the attempt, if ranks run."""
        self._rules, self._run_id, self._seats = seats.rules, run_id, seats
        self._inspections, self._after, self._cut = inspections, call_later, on_expired
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
            self._start_job_timer()  # also where no rank ever starts
        self._attempt = attempt
        self._asking = self._suspected = self._stalled = False
        self._reported = ()
        self._usual.clear()
        self._straggling.clear()
        for node in list(self._debugging):
            self.on_debugger_active(node, busy=False)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def take(self, node: int, message: FromNode) -> None:
        """Take in what a node reports of its ranks in this attempt."""
        match message:
            case RanksStarted():
                self.on_ranks_started()
            case StallSuspected():
                self.on_stall_suspected()
            case ProgressResumed():
                self.on_progress_resumed()
            case StragglersFound():
                self.on_stragglers_found(node)
            case DebuggerActive(is_active=busy):
                self.on_debugger_active(node, busy=busy)

    def on_ranks_started(self) -> None:
        """The first rank of a node runs."""
        if not self._ran:
            self._ran = True
            self._left = self._rules.timeout
            self._start_job_timer()

    def _start_job_timer(self) -> None:
        if self._job_timer is not None:
            self._job_timer.cancel()
        if self._left is not None and not self.over and not self._debugging:
            self._set_at = self._clock()
            self._job_timer = self._after(self._left, self._on_job_timeout)

    def on_debugger_active(self, node: int, *, busy: bool) -> None:
        """A rank of this node is in a debugger, or none is any more: meanwhile no time limit runs."""
        before = bool(self._debugging)
        (self._debugging.add if busy else self._debugging.discard)(node)
        if before == bool(self._debugging):
            return
        if self._debugging:
            self._seats.broadcast(JobStalled(time.time(), ""))
        else:
            self._stalled = False
            self._seats.broadcast(ProgressResumed(self._attempt))
        if self._debugging and self._job_timer is not None and self._left is not None:
            self._job_timer.cancel()
            self._left = max(0.0, self._left - (self._clock() - self._set_at))
        elif not self._debugging:
            self._start_job_timer()

    def end(self) -> None:
        """The job is over."""
        self.begin(self._attempt)
        if self._job_timer is not None:
            self._job_timer.cancel()

    def _on_job_timeout(self) -> None:
        self.over = True
        self._cut(TimeLimitExpired(f"{format_elapsed(self._rules.timeout or 0)} have passed (--timeout)", None))

    def _set_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Set one of the timers of an attempt, which each replace the one of the same name."""
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._after(seconds, callback)

    # ------------------------------------------------------------------------------------------------------- stalls

    def on_stall_suspected(self) -> None:
        """A node's ranks do not get on: ask all nodes, but not once for each of them."""
        if self._asking:
            self._suspected = True
        else:
            self._inspect_for_stall()

    def _inspect_for_stall(self) -> None:
        self._asking, self._suspected = True, False
        attempt = self._attempt
        self._inspections.begin(
            diagnosis.inspection.Detail.WAITS, lambda inspection: self._check_for_stall(attempt, inspection)
        )

    def _check_for_stall(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        rules = self._rules
        if self._debugging:
            self._set_timer("asking", rules.stall_check_interval_s / 2, self._on_check_interval)
            return
        stall, sooner = diagnosis.stall.check_stall(inspection, rules.stall_timeout, strict=rules.stall_strict)
        if sooner is None:
            self._set_timer(
                "asking", min(rules.stall_check_interval_s / 2, STALL_CHECK_INTERVAL_S), self._on_check_interval
            )
        else:
            self._set_timer("asking", sooner, self._inspect_for_stall)
        if stall is None:
            self._check_for_early_stall(attempt, inspection)
        elif rules.on_stall != "report" and stall.killable:
            found = diagnosis.culprit.find_culprit(inspection)
            what = found.text if found else stall.text
            hint = FALSE_STALL_HINT if stall.is_alive and stall.only_looks_idle else None
            failure = self._make_failure(inspection, stall.rank, "the job stalled", stall.trace, hint)
            text = (
                f"no progress for {format_elapsed(stall.seconds)} (--stall-timeout): {what}{self._format_host(failure)}"
            )
            self._send_stalled(stall, "")
            self._cut(TimeLimitExpired(text, failure, stall.is_alive, rules.on_stall == "restart", inspection))
        else:
            self._report_stall(stall)

    def _check_for_early_stall(self, attempt: int, inspection: Inspection) -> None:
        """Say which ranks wait, before the stall timeout is over, where that is unusual for this job and place."""
        stall, sooner = diagnosis.stall.check_stall(inspection, EARLY_STALL_CHECK_S, strict=False, noisy=LONG_WAIT)
        if sooner is not None:
            self._set_timer("telling", sooner, self.on_stall_suspected)
        if stall is None:
            return
        if stall.progress_key == self._reported:
            return self._report_stall(stall)

        def compare(inspection: Inspection) -> None:
            if attempt != self._attempt:
                return
            gap = diagnosis.pace.typical_gap(each for rank in inspection.ranks for each in rank.arrivals)
            usual = max(_UNUSUAL_WAIT_FACTOR * gap, self._usual.get(stall.location, EARLY_STALL_CHECK_S))
            if stall.seconds >= usual:
                self._usual[stall.location] = _REPEAT_WAIT_FACTOR * stall.seconds
                self._report_stall(stall)
            elif usual < self._rules.stall_timeout:
                self._set_timer("telling", usual - stall.seconds, self.on_stall_suspected)

        self._inspections.begin(diagnosis.inspection.Detail.LATENESS, compare)

    def _report_stall(self, stall: Stall) -> None:
        """Say it to people once; where a rank has only printed something since, it is counted as it was before."""
        if stall.progress_key != self._reported:
            self._reported = stall.progress_key
            closer = f"look closer with `ddplaunch stacks {self._run_id}`"
            self._send_stalled(stall, f"no progress for {format_elapsed(stall.seconds)}: {stall.text}; {closer}")
        elif not self._stalled:
            self._send_stalled(stall, "")

    def _send_stalled(self, stall: Stall, text: str) -> None:
        self._stalled = True
        self._seats.broadcast(JobStalled(time.time() - stall.seconds, text))

    def on_progress_resumed(self) -> None:
        """A node says that its ranks, which had stalled, work again."""
        if self._stalled and not self._debugging:
            self._stalled = False
            self._seats.broadcast(ProgressResumed(self._attempt))

    def _on_check_interval(self) -> None:
        self._asking = False
        if self._suspected:
            self._inspect_for_stall()

    # --------------------------------------------------------------------------------------------------- stragglers

    def on_ranks_finished(self) -> None:
        """All ranks of a node have done their work, those of others have not."""
        if self._rules.straggler_timeout is not None:
            self._set_timer("stragglers", self._rules.straggler_timeout, self._inspect_stragglers)

    def on_stragglers_found(self, node: int) -> None:
        """Some ranks of a node run on, long after the last of its others has ended."""
        self._straggling.add(node)
        self._inspect_stragglers()

    def _inspect_stragglers(self) -> None:
        attempt, detail = self._attempt, diagnosis.inspection.Detail.STACKS
        self._inspections.begin(detail, lambda inspection: self._check_stragglers(attempt, inspection))

    def _check_stragglers(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        if self._debugging:
            return self._set_timer("stragglers", self._rules.straggler_timeout or 0.0, self._inspect_stragglers)
        working = [seat for seat in self._seats.values() if seat.phase is NodePhase.RUNNING]
        ours = {rank for seat in working for rank in seat.ranks}
        left = diagnosis.stall.find_stragglers(inspection, ours)
        recent = {rank for seat in working if seat.node_rank not in self._straggling for rank in seat.ranks}
        if not left or (recent & ours) - {rank.rank for rank in left}:
            return  # some have ended there, lately: that node's own word comes
        trace, place = diagnosis.stall.format_trace(left[0]), diagnosis.stall.describe_locations(left)
        failure = self._make_failure(inspection, left[0].rank, "it ran on after the others had ended", trace)
        seconds = format_elapsed(self._rules.straggler_timeout or 0)
        text = f"{format_ranks(rank.rank for rank in left)} ran on for {seconds} after the others had ended"
        text += " (--straggler-timeout)" + (f": {place}" if place else "") + self._format_host(failure)
        self._cut(TimeLimitExpired(text, failure, rank_was_alive=True, inspection=inspection))

    def _format_host(self, failure: RankFailure) -> str:
        return f" (on {failure.host})" if self._rules.max_nodes > 1 else ""

    def _make_failure(
        self, inspection: Inspection, number: int, message: str, trace: str, hint: str | None = None
    ) -> RankFailure:
        """The failure of a rank that the others waited for."""
        rank = next(rank for rank in inspection.ranks if rank.rank == number)
        first = next((seat.ranks.start for seat in self._seats.values() if number in seat.ranks), number)
        return RankFailure(
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
