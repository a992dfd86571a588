"""The message with which node 0 has a node check its machine."""

from __future__ import annotations

from ddplaunch.core.messages import CheckRequest, FromNodeZero


class CheckNode(CheckRequest, FromNodeZero, frozen=True):
    """Check your machine before this attempt, and wait for GPU memory in use.

    The reply is ``CheckPassed`` or ``NodeStartError``.
    """
