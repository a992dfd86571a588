"""--stall-timeout on node 0: whether the ranks wait for each other without progress, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddplaunch.base.text import format_elapsed
from ddplaunch.core.feature import JobContext
from ddplaunch.core.job.job_attempt import StopCause
from ddplaunch.observe.diagnosis.culprit import find_culprit
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.diagnosis.slow_ranks import typical_collective_gap_s
from ddplaunch.observe.diagnosis.stall_check import Stall, check_stall
from ddplaunch.observe.job.awaited_rank import format_hosts, make_failure
from ddplaunch.observe.job.loop_watch import LOOP_SIGHTING, BusyRankWatch
from ddplaunch.observe.options import EARLY_STALL_CHECK_S, LONG_WAIT, Hangs

STALL_CHECK_INTERVAL_S = 2.0  # the longest, between two inspections of a job that may have stalled
_UNUSUAL_WAIT_FACTOR = 10.0  # a wait is reported early if longer than this times the typical gap between collectives
_REPEAT_WAIT_FACTOR = 3.0  # the next wait at the same place is reported if longer than this times the reported one
FALSE_STALL_HINT = "if the ranks were busy, raise --stall-timeout or call ddplaunch.runtime.working()"


DEADLINES = CHECK_INTERVAL, INSPECT, EARLY_REPORT = "check interval", "inspect", "early report"
"""The end of the pause after an inspection; the next inspection of a job that may have stalled; an early report."""


class StallLimit:
    """Inspects the ranks when a node suspects a stall; reports the stall or stops the attempt, as --on-stall says."""

    def __init__(self, context: JobContext, on_expired: Callable[[StopCause, Inspection], None]) -> None:
        """``on_expired`` is called when a stall is to end the attempt; it stops the attempt if ranks run."""
        self._context, self._hangs, self._on_expired = context, context.options[Hangs], on_expired
        self._limits = context.limits
        self._attempt = -1
        self._inspecting = False  # an inspection is in progress, or the pause after one
        self._suspected_again = False  # a node has suspected a stall meanwhile
        self._reported: tuple[object, ...] = ()
        self._report_after_s: dict[str, float] = {}  # by location: how long a wait there must last to be reported
        self._loops = BusyRankWatch(context)

    def begin(self, attempt: int) -> None:
        """Called when an attempt starts: reset the state of the previous one."""
        self._context.cancel_deadlines(*DEADLINES)
        self._attempt = attempt
        self._inspecting = self._suspected_again = False
        self._reported = ()
        self._report_after_s.clear()
        self._loops.begin()

    def on_deadline(self, name: str) -> None:
        """Called when one of DEADLINES, or the deadline of ``BusyRankWatch``, has passed."""
        if name == INSPECT:
            self._inspect()
        elif name in (EARLY_REPORT, LOOP_SIGHTING):
            self.on_suspected()
        else:
            self._inspecting = False
            if self._suspected_again:
                self._inspect()

    def on_suspected(self) -> None:
        """Called when a node suspects a stall: inspect all nodes, one inspection at a time."""
        if self._inspecting:
            self._suspected_again = True
        else:
            self._inspect()

    def _inspect(self) -> None:
        self._inspecting, self._suspected_again = True, False
        self._context.gather("inspect", Detail.WAITS, partial(self._check, self._attempt))

    def _check(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        hangs = self._hangs
        if self._limits.are_paused:
            return self._set_next_check(CHECK_INTERVAL, hangs.stall_check_interval_s / 2)
        stall, check_again_s = check_stall(inspection, hangs.stall_timeout_s, strict=hangs.is_strict)
        if check_again_s is None:
            self._set_next_check(CHECK_INTERVAL, min(hangs.stall_check_interval_s / 2, STALL_CHECK_INTERVAL_S))
        else:
            self._set_next_check(INSPECT, check_again_s)
        if stall is None:
            self._check_early(attempt, inspection)
            self._loops.observe(inspection)
        elif hangs.stall_action != "report" and stall.killable:
            found = find_culprit(inspection)
            what, ranks = (found.text, found.ranks) if found else (stall.text, (stall.rank,))
            hint = FALSE_STALL_HINT if stall.is_alive and stall.only_looks_idle else None
            failure = make_failure(self._context, attempt, inspection, stall.rank, "the job stalled", stall.trace, hint)
            seconds, hosts = format_elapsed(stall.seconds), format_hosts(self._context, inspection, ranks)
            text = f"no progress for {seconds} (--stall-timeout): {what}{hosts}"
            self._send_stalled(stall, "")
            self._on_expired(StopCause(text, failure, stall.is_alive, hangs.stall_action == "restart"), inspection)
        else:
            self._report(stall)

    def _set_next_check(self, name: str, seconds: float) -> None:
        self._context.cancel_deadlines(CHECK_INTERVAL, INSPECT)
        self._context.set_deadline(name, seconds)

    def _check_early(self, attempt: int, inspection: Inspection) -> None:
        """Report a wait before the stall timeout has expired if it is unusually long for this job and location."""
        stall, check_again_s = check_stall(inspection, EARLY_STALL_CHECK_S, strict=False, noisy=LONG_WAIT)
        if check_again_s is not None:
            self._context.set_deadline(EARLY_REPORT, check_again_s)
        if stall is None:
            return
        if stall.progress_key == self._reported:
            return self._report(stall)
        self._context.gather("inspect", Detail.LATENESS, partial(self._report_unusual_wait, attempt, stall))

    def _report_unusual_wait(self, attempt: int, stall: Stall, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        gap = typical_collective_gap_s(each for rank in inspection.ranks for each in rank.arrivals)
        report_after = max(_UNUSUAL_WAIT_FACTOR * gap, self._report_after_s.get(stall.location, EARLY_STALL_CHECK_S))
        if stall.seconds >= report_after:
            self._report_after_s[stall.location] = _REPEAT_WAIT_FACTOR * stall.seconds
            self._report(stall)
        elif report_after < self._hangs.stall_timeout_s:
            self._context.set_deadline(EARLY_REPORT, report_after - stall.seconds)

    def _report(self, stall: Stall) -> None:
        """Print a stall once; if a rank has only printed something since, send JobStalled again without a text."""
        if stall.progress_key != self._reported:
            self._reported = stall.progress_key
            closer = f"for details: ddplaunch stacks {self._context.run_id}"
            self._send_stalled(stall, f"no progress for {format_elapsed(stall.seconds)}: {stall.text}; {closer}")
        elif not self._limits.is_stalled:
            self._send_stalled(stall, "")

    def _send_stalled(self, stall: Stall, text: str) -> None:
        self._context.report_stall(self._context.now.wall - stall.seconds, text)
