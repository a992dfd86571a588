"""The deadlines of ``JobMachine``: each class is what the machine does when it is due."""

from __future__ import annotations

from ddplaunch.core.deadlines import Deadline


class PhaseDeadline(Deadline, frozen=True):
    """Base class of deadlines that a new phase of the job cancels; the phase STOPPING cancels only WaitNoticeDue."""


class JoinTimeoutOver(PhaseDeadline, frozen=True):
    """End the job if too few nodes have joined."""


class JoinWindowOver(PhaseDeadline, frozen=True):
    """Start an elastic job without the nodes that have not joined."""


class JoinStatusDue(PhaseDeadline, frozen=True):
    """Tell all nodes which nodes have joined."""


class ChecksLate(PhaseDeadline, frozen=True):
    """Print which nodes have not replied to a check."""


class EarlyReportDue(PhaseDeadline, frozen=True):
    """Print why the ranks are stopped, before all of them have ended."""


class FailureCauseLate(PhaseDeadline, frozen=True):
    """Stop the ranks: a rank has lost a connection, and no failure that explains it was reported in time."""


class PreemptGraceOver(PhaseDeadline, frozen=True):
    """Stop the ranks, which have had the time to save a checkpoint."""


class WaitNoticeDue(PhaseDeadline, frozen=True):
    """Print, on nodes that have finished, which nodes they wait for."""


class ReportIntervalOver(PhaseDeadline, frozen=True):
    """Count one interval of the wait for the nodes' AttemptReports."""


class RestartDue(PhaseDeadline, frozen=True):
    """Start the next attempt."""


class JobTimeoutOver(Deadline, frozen=True):
    """Stop the job: --timeout."""


class RequestLate(Deadline, frozen=True):
    """Reply to a request with what the nodes have sent so far."""

    serial: int


class FeatureDeadline(Deadline, frozen=True):
    """Call the job side of the feature that has set this deadline."""

    feature: str
    name: str
