"""The check of every node before its ranks start: ``--check``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, JobContext, JobSide
from ddplaunch.core.messages import CheckNode
from ddplaunch.features.check.options import Checking


class CheckJob(JobSide):
    """Requests the check of every node before each attempt."""

    def __init__(self, gpu_memory_timeout: float) -> None:
        self._gpu_memory_timeout = gpu_memory_timeout

    def before_start(self, attempt: int) -> CheckNode:
        return CheckNode(attempt, self._gpu_memory_timeout)


class Check(Feature):
    options = (Checking,)

    def make_job_side(self, context: JobContext) -> JobSide | None:
        return CheckJob(context.config.gpu_memory_timeout) if context.config.checks_nodes else None


FEATURE = Check()
