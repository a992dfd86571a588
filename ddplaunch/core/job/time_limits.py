"""The time limits of a job: --timeout, --stall-timeout and --straggler-timeout. Decides when one has expired; the
coordinator then stops the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.base.errors import EXIT_TIMEOUT
from ddplaunch.base.event_loop import Timer
from ddplaunch.base.text import format_elapsed, format_ranks
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.job.job_attempt import TimeLimitExpired
from ddplaunch.core.job.node_table import NodePhase, NodeTable
from ddplaunch.core.job.rpc import Rpc
from ddplaunch.core.job_config import EARLY_STALL_CHECK_S, LONG_WAIT
from ddplaunch.core.messages import (
    FromNode,
    HoldChanged,
    JobStalled,
    ProgressResumed,
    RanksStarted,
    StallSuspected,
    StragglersFound,
)
from ddplaunch.features.inspect.diagnosis.culprit import find_culprit
from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection
from ddplaunch.features.inspect.diagnosis.slow_ranks import typical_gap
from ddplaunch.features.inspect.diagnosis.stall_check import (
    Stall,
    check_stall,
    describe_locations,
    find_stragglers,
    format_trace,
)

STALL_CHECK_INTERVAL_S = 2.0  # the longest, between two inspections of a job that may have stalled
_UNUSUAL_WAIT_FACTOR = 10.0  # a wait is reported early if longer than this times the typical gap between collectives
_REPEAT_WAIT_FACTOR = 3.0  # the next wait at the same place is reported if longer than this times the reported one
FALSE_STALL_HINT = "if the ranks were busy, raise --stall-timeout or call ddplaunch.runtime.working()"


class TimeLimits:
    """The time limits of one job."""

    def __init__(
        self,
        run_id: str,
        nodes: NodeTable,
        rpc: Rpc,
        call_later: Callable[[float, Callable[[], None]], Timer],
        on_expired: Callable[[TimeLimitExpired], None],
        clock: Callable[[], float],
    ) -> None:
        """``call_later`` and ``clock`` are the loop's; ``on_expired`` stops the attempt if ranks run."""
        self._config, self._run_id, self._nodes = nodes.config, run_id, nodes
        self._rpc, self._call_later, self._on_expired = rpc, call_later, on_expired
        self.timeout_expired = False  # whether --timeout has expired
        self._attempt = -1
        self._ranks_started = False  # whether a rank has started: --timeout counts from then
        self._inspecting = False  # a stall inspection is in progress, or the pause after one
        self._suspected_again = False  # a node has suspected a stall during that
        self._reported: tuple[object, ...] = ()
        self._stalled = False  # whether the nodes were sent JobStalled, and no ProgressResumed since
        self._report_after_s: dict[str, float] = {}  # by location: how long a wait there must last to be reported
        self._straggler_nodes: set[int] = set()  # nodes that have sent StragglersFound
        self._timers: dict[str, Timer] = {}
        self._job_timer: Timer | None = None
        self._remaining_s = self._config.timeout  # of --timeout, at ``_set_at``, when its timer was last set
        self._clock, self._set_at = clock, clock()
        self._holding: set[int] = set()  # nodes with a rank that waits for a user: no time limit counts

    def begin(self, attempt: int) -> None:
        """Called when an attempt starts: reset what belongs to the previous one."""
        if self._attempt < 0:
            self._start_job_timer()  # also where no rank ever starts
        self._attempt = attempt
        self._inspecting = self._suspected_again = self._stalled = False
        self._reported = ()
        self._report_after_s.clear()
        self._straggler_nodes.clear()
        for node in list(self._holding):
            self.on_hold_changed(node, is_holding=False)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def on_message(self, node: int, message: FromNode) -> None:
        """Handle a node's message about its ranks in this attempt."""
        match message:
            case RanksStarted():
                self.on_ranks_started()
            case StallSuspected():
                self.on_stall_suspected()
            case ProgressResumed():
                self.on_progress_resumed()
            case StragglersFound():
                self.on_stragglers_found(node)
            case HoldChanged(is_holding=is_holding):
                self.on_hold_changed(node, is_holding=is_holding)

    def on_ranks_started(self) -> None:
        """Called when the first rank of a node has started: --timeout counts from the first one."""
        if not self._ranks_started:
            self._ranks_started = True
            self._remaining_s = self._config.timeout
            self._start_job_timer()

    def _start_job_timer(self) -> None:
        if self._job_timer is not None:
            self._job_timer.cancel()
        if self._remaining_s is not None and not self.timeout_expired and not self._holding:
            self._set_at = self._clock()
            self._job_timer = self._call_later(self._remaining_s, self._on_job_timeout)

    def on_hold_changed(self, node: int, *, is_holding: bool) -> None:
        """Called when a rank of this node waits for a user, or none does any more: pauses the time limits."""
        before = bool(self._holding)
        (self._holding.add if is_holding else self._holding.discard)(node)
        if before == bool(self._holding):
            return
        if self._holding:
            self._nodes.broadcast(JobStalled(time.time(), ""))
        else:
            self._stalled = False
            self._nodes.broadcast(ProgressResumed(self._attempt))
        if self._holding and self._job_timer is not None and self._remaining_s is not None:
            self._job_timer.cancel()
            self._remaining_s = max(0.0, self._remaining_s - (self._clock() - self._set_at))
        elif not self._holding:
            self._start_job_timer()

    def end(self) -> None:
        """Called when the job ends: cancel all timers."""
        self.begin(self._attempt)
        if self._job_timer is not None:
            self._job_timer.cancel()

    def _on_job_timeout(self) -> None:
        self.timeout_expired = True
        self._on_expired(TimeLimitExpired(f"--timeout ({format_elapsed(self._config.timeout or 0)}) expired", None))

    def _set_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Set a timer of the attempt; it replaces the one of the same name."""
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._call_later(seconds, callback)

    # ------------------------------------------------------------------------------------------------------- stalls

    def on_stall_suspected(self) -> None:
        """Called when a node's ranks make no progress: inspect all nodes, once for the suspicions of many nodes."""
        if self._inspecting:
            self._suspected_again = True
        else:
            self._inspect_for_stall()

    def _inspect_for_stall(self) -> None:
        self._inspecting, self._suspected_again = True, False
        attempt = self._attempt
        self._rpc.gather("inspect", Detail.WAITS, lambda inspection: self._check_for_stall(attempt, inspection))

    def _check_for_stall(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        config = self._config
        if self._holding:
            self._set_timer("stall check", config.stall_check_interval_s / 2, self._on_check_interval)
            return
        stall, check_again_s = check_stall(inspection, config.stall_timeout, strict=config.stall_strict)
        if check_again_s is None:
            self._set_timer(
                "stall check", min(config.stall_check_interval_s / 2, STALL_CHECK_INTERVAL_S), self._on_check_interval
            )
        else:
            self._set_timer("stall check", check_again_s, self._inspect_for_stall)
        if stall is None:
            self._check_for_early_stall(attempt, inspection)
        elif config.on_stall != "report" and stall.killable:
            found = find_culprit(inspection)
            what = found.text if found else stall.text
            hint = FALSE_STALL_HINT if stall.is_alive and stall.only_looks_idle else None
            failure = self._make_failure(inspection, stall.rank, "the job stalled", stall.trace, hint)
            text = (
                f"no progress for {format_elapsed(stall.seconds)} (--stall-timeout): {what}{self._format_host(failure)}"
            )
            self._send_stalled(stall, "")
            self._on_expired(TimeLimitExpired(text, failure, stall.is_alive, config.on_stall == "restart", inspection))
        else:
            self._report_stall(stall)

    def _check_for_early_stall(self, attempt: int, inspection: Inspection) -> None:
        """Report a wait before the stall timeout has expired if it is unusually long for this job and location."""
        stall, check_again_s = check_stall(inspection, EARLY_STALL_CHECK_S, strict=False, noisy=LONG_WAIT)
        if check_again_s is not None:
            self._set_timer("early report", check_again_s, self.on_stall_suspected)
        if stall is None:
            return
        if stall.progress_key == self._reported:
            return self._report_stall(stall)

        def compare(inspection: Inspection) -> None:
            if attempt != self._attempt:
                return
            gap = typical_gap(each for rank in inspection.ranks for each in rank.arrivals)
            report_after = max(
                _UNUSUAL_WAIT_FACTOR * gap, self._report_after_s.get(stall.location, EARLY_STALL_CHECK_S)
            )
            if stall.seconds >= report_after:
                self._report_after_s[stall.location] = _REPEAT_WAIT_FACTOR * stall.seconds
                self._report_stall(stall)
            elif report_after < self._config.stall_timeout:
                self._set_timer("early report", report_after - stall.seconds, self.on_stall_suspected)

        self._rpc.gather("inspect", Detail.LATENESS, compare)

    def _report_stall(self, stall: Stall) -> None:
        """Print a stall once; if a rank has only printed something since, send JobStalled again without a text."""
        if stall.progress_key != self._reported:
            self._reported = stall.progress_key
            closer = f"look closer with `ddplaunch stacks {self._run_id}`"
            self._send_stalled(stall, f"no progress for {format_elapsed(stall.seconds)}: {stall.text}; {closer}")
        elif not self._stalled:
            self._send_stalled(stall, "")

    def _send_stalled(self, stall: Stall, text: str) -> None:
        self._stalled = True
        self._nodes.broadcast(JobStalled(time.time() - stall.seconds, text))

    def on_progress_resumed(self) -> None:
        """Called when the ranks of a node, which had stalled, make progress again."""
        if self._stalled and not self._holding:
            self._stalled = False
            self._nodes.broadcast(ProgressResumed(self._attempt))

    def _on_check_interval(self) -> None:
        self._inspecting = False
        if self._suspected_again:
            self._inspect_for_stall()

    # --------------------------------------------------------------------------------------------------- stragglers

    def on_ranks_finished(self) -> None:
        """Called when all ranks of a node have finished, and ranks of others still run."""
        if self._config.straggler_timeout is not None:
            self._set_timer("stragglers", self._config.straggler_timeout, self._inspect_stragglers)

    def on_stragglers_found(self, node: int) -> None:
        """Called when ranks of a node still run --straggler-timeout after the node's other ranks have ended."""
        self._straggler_nodes.add(node)
        self._inspect_stragglers()

    def _inspect_stragglers(self) -> None:
        attempt, stacks = self._attempt, Detail.STACKS
        self._rpc.gather("inspect", stacks, lambda inspection: self._check_stragglers(attempt, inspection))

    def _check_stragglers(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        if self._holding:
            return self._set_timer("stragglers", self._config.straggler_timeout or 0.0, self._inspect_stragglers)
        working = [node for node in self._nodes.values() if node.phase is NodePhase.RUNNING]
        ours = {rank for node in working for rank in node.ranks}
        left = find_stragglers(inspection, ours)
        recent = {rank for node in working if node.node_rank not in self._straggler_nodes for rank in node.ranks}
        if not left or (recent & ours) - {rank.rank for rank in left}:
            return  # some ranks there ended recently: wait for that node's StragglersFound
        trace, place = format_trace(left[0]), describe_locations(left)
        failure = self._make_failure(inspection, left[0].rank, "still running after the other ranks had ended", trace)
        seconds = format_elapsed(self._config.straggler_timeout or 0)
        text = f"{format_ranks(rank.rank for rank in left)} still running {seconds} after the others had ended"
        text += " (--straggler-timeout)" + (f": {place}" if place else "") + self._format_host(failure)
        self._on_expired(TimeLimitExpired(text, failure, rank_was_alive=True, inspection=inspection))

    def _format_host(self, failure: RankFailure) -> str:
        return f" (on {failure.host})" if self._config.max_nodes > 1 else ""

    def _make_failure(
        self, inspection: Inspection, number: int, message: str, trace: str, hint: str | None = None
    ) -> RankFailure:
        """Build the failure of a rank that the others waited for; its exit code is that of a timeout."""
        rank = next(rank for rank in inspection.ranks if rank.rank == number)
        first = next((node.ranks.start for node in self._nodes.values() if number in node.ranks), number)
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
