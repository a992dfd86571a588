"""The message by which node 0 requests the check of a node."""

from __future__ import annotations

from ddplaunch.base.types import Seconds
from ddplaunch.core.messages import AttemptMessage, FromNodeZero


class CheckNode(AttemptMessage, FromNodeZero, frozen=True):
    """Check your machine before this attempt; the reply is ``CheckPassed`` or ``NodeStartError``."""

    gpu_memory_timeout: Seconds  # how long to wait for GPU memory in use
