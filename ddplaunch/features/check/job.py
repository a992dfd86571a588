"""The check's part on node 0: requests it of every node."""

from __future__ import annotations

from ddplaunch.core.feature import JobSide
from ddplaunch.features.check.messages import CheckNode


class CheckJob(JobSide):
    """Requests the check of every node before each attempt."""

    def __init__(self, gpu_memory_timeout: float) -> None:
        self._gpu_memory_timeout = gpu_memory_timeout

    def before_start(self, attempt: int) -> CheckNode:
        return CheckNode(attempt, self._gpu_memory_timeout)
