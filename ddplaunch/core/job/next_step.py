"""What follows an attempt once all its ranks have ended: another attempt, or the end of the job with its result."""

from __future__ import annotations

import signal
from typing import NamedTuple

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_TIMEOUT, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.text import signal_name
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import FailureReport, JobResult, format_early_report
from ddplaunch.core.job.job_attempt import JobAttempt, NodeFailure
from ddplaunch.core.job.job_sides import JobSides
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_table import JoinedNode, NodePhase, NodeTable
from ddplaunch.core.job.restart_policy import RestartPolicy
from ddplaunch.core.job.time_limits import TimeLimits
from ddplaunch.core.machine import Command
from ddplaunch.core.messages import Restarting, StopRequested
from ddplaunch.core.options import Stopping


class StopReason:
    """Why the whole job is to end: a signal, a command, or the scheduler's preemption notice."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes, self._config = nodes, nodes.config
        self._options = nodes.config.options
        self.signal = 0  # 0: none
        self.is_repeated = False  # whether the stop was requested a second time, so without grace
        self.preempted_by: str | None = None  # the notice: "SIGUSR2 on node 1"
        self.preemption_seen = False  # whether a rank has called runtime.preempted() and got True
        self.why = ""  # set if a rank or a command requested the stop
        self.follows_failure = False  # whether a rank had failed before; its report is shown all the same

    @property
    def is_set(self) -> bool:
        return bool(self.signal) or self.preempted_by is not None

    def add_request(
        self, node: JoinedNode, message: StopRequested, attempt: JobAttempt
    ) -> tuple[float | None, list[Command]]:
        """Record a stop request; return the grace with which to stop the ranks, None if an earlier request stops them.

        Slurm and Kubernetes signal all nodes at once: only a second signal on the same node shortens the grace.
        """
        if self.signal:
            self.is_repeated |= message.again
            return (0.0 if message.again else None), []
        self.signal = message.signal
        first = report.first if (report := attempt.failure_report) else None
        self.follows_failure = first is not None and not (first.is_secondary or first.was_ended_by_stop_signal)
        self.why = f"stopped because {message.reason}" if message.reason else ""
        name = "Ctrl-C" if message.signal == signal.SIGINT else signal_name(message.signal)
        note = self._nodes.note_to_all(f"{message.reason or name} on {node.name}", but=node.node_rank)
        # with the grace, even if it is the node's second request: its first may only have removed the node
        return self._options[Stopping].grace, note

    def add_preemption(self, node: JoinedNode, signal_number: int) -> None:
        """Record the scheduler's notice."""
        self.preempted_by = signal_name(signal_number) + (f" on {node.name}" if self._config.is_multi_node else "")

    def result(self, report: FailureReport | None) -> JobResult:
        """Return the result of a job that a signal has stopped; with the report, if a rank had failed before."""
        return JobResult(EXIT_SIGNAL + self.signal, report if self.follows_failure else None)


class Pause(NamedTuple):
    """Another attempt starts after ``delay_s`` seconds; ``failure``: how the latest one failed, if a rank failed.

    ``code`` and ``why`` are those of ``AttemptEnded``.
    """

    delay_s: float
    failure: FailureReport | None
    code: int | None
    why: str


Step = tuple[JobResult | Pause, list[Command]]
"""What follows an attempt, and the commands that announce it."""


class NextStepPolicy:
    """Decides after each attempt whether the job starts another one or ends."""

    def __init__(
        self, nodes: NodeTable, membership: Membership, limits: TimeLimits, stop: StopReason, sides: JobSides
    ) -> None:
        self._nodes, self._config = nodes, nodes.config
        self._options = nodes.config.options
        self._membership, self._limits, self._stop, self._sides = membership, limits, stop, sides
        self._restarts = RestartPolicy(nodes.config)

    def decide(self, attempt: JobAttempt, now: Now, *, was_stopped: bool) -> Step:
        """Return what follows an attempt: the first cause below that applies decides, not the one that came first."""
        report, preempted_by = self._sides.explain_failures(attempt), self._stop.preempted_by
        succeeded = attempt.is_clean and not was_stopped
        if self._stop.signal:
            why = "; ".join(filter(None, (self._stop.why, self._sides.remark(time_limit=False))))
            return replace(self._stop.result(report), remark=why or None), []
        if preempted_by and not (succeeded and not self._stop.preemption_seen):
            advice = f"the same command may be run again (exit code {EXIT_PREEMPTED})"
            return JobResult(EXIT_PREEMPTED, report, remark=f"preempted by {preempted_by}: {advice}"), []
        if launcher_failure := attempt.first_launcher_failure:
            return self._restart_or_end(attempt, None, launcher_failure, now)
        if cause := attempt.first_lost_node:
            return self._restart_with_changed_nodes(cause.reason)
        if attempt.stop_cause and attempt.stop_cause.of_program:
            return self._restart_or_end(attempt, None, None, now)
        if attempt.stop_cause and not attempt.stop_cause.may_restart:
            return attempt.stopped_result(self._sides.remark(time_limit=True)), []
        if report is None and attempt.stopping_to_change_nodes:
            return self._restart_with_changed_nodes("")
        if report is None:
            return JobResult(0), []
        if report.first.refused:
            return JobResult(EXIT_USAGE, usage_error=report.first.refused), []
        return self._restart_or_end(attempt, report, None, now)

    def early_report(self, attempt: JobAttempt) -> str | None:
        """Describe the cause of the stop before all ranks have ended, which may take up to the grace."""
        report = self._sides.explain_failures(attempt)
        by_program = attempt.stop_cause is not None and attempt.stop_cause.of_program
        if report is None or self._stop.signal or attempt.first_lost_node or by_program:
            return None
        busy = [node.name for node in self._nodes.values() if node.phase is not NodePhase.DRAINED]
        several = self._config.is_multi_node
        return format_early_report(
            report.headline(several=several), self._options[Stopping].grace, busy if several else ()
        )

    def _restart_or_end(
        self, attempt: JobAttempt, report: FailureReport | None, launcher_failure: NodeFailure | None, now: Now
    ) -> Step:
        """Called when a rank or a program failed, or a launcher process was lost: restart all if allowed, else end."""
        uptime, expired = now.mono - attempt.started_at, self._limits.timeout_expired
        wait, why_not = self._restarts.decide(attempt, uptime, deadline_passed=expired)
        commands: list[Command] = []
        if wait is not None:
            commands += self._membership.record_failure(report, launcher_failure)
            if shortage := self._membership.shortage:
                wait, why_not = None, f"{shortage} to start again"
        if report:
            what = report.headline(several=self._config.is_multi_node)
        elif launcher_failure:
            what = launcher_failure.reason
        else:
            what = attempt.stop_cause.reason if attempt.stop_cause else ""
        if wait is None and not report and not launcher_failure:
            result = attempt.stopped_result(self._sides.remark(time_limit=True))
            return replace(result, remark="\n".join(filter(None, (result.remark, why_not)))), commands
        code = report.first.shell_exit_code if report else EXIT_SIGNAL + signal.SIGKILL
        if wait is None:
            remark = why_not if report else "; ".join(filter(None, (what, why_not)))
            return JobResult(code, report, remark=remark), commands
        text = f"{what}\n{self._restarts.describe_restart(wait)}"
        commands += self._nodes.to_all(Restarting(attempt.number + 1, wait, text, report))
        if attempt.stop_cause and not report and not launcher_failure:
            code = attempt.stop_cause.code
        return Pause(wait, report, code, what), commands

    def _restart_with_changed_nodes(self, why: str) -> Step:
        """Start again with the nodes that are there now; counts for --max-membership-changes, not --max-restarts."""
        if self._limits.timeout_expired:
            return JobResult(EXIT_TIMEOUT, remark="; ".join(filter(None, (why, "--timeout has expired")))), []
        if over := self._membership.count_change(why):
            return JobResult(EXIT_UNAVAILABLE, remark=over), []
        return Pause(0, None, None, why), self._nodes.note_to_all(self._membership.next_attempt_note)
