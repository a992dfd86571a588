"""Node 0's part: requests all nodes to keep the evidence before the ranks of a stalled attempt are stopped."""

from __future__ import annotations

from ddplaunch.core.feature import JobContext, JobSide, RpcCall
from ddplaunch.core.job.job_attempt import JobAttempt

KEEP_TIMEOUT_S = 4.0  # after this time the ranks are stopped without the evidence


class StallJob(JobSide):
    """The job side: requests the evidence from all nodes before an attempt is stopped for a stall or a timeout."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def before_stop(self, attempt: JobAttempt) -> RpcCall | None:
        has_stalled = self._context.limits.is_stalled and attempt.stop_cause is not None
        has_timed_out = any(failure.is_timeout for failure in attempt.failures.values())
        if not (has_stalled or has_timed_out) or not self._context.config.inspects_before_stop:
            return None
        from ddplaunch.features.nccl.rpc import KIND, StallRequest

        return RpcCall(KIND.name, StallRequest(attempt.number), KEEP_TIMEOUT_S)
