"""The message with which node 0 has a node check its machine."""

from __future__ import annotations

from ddplaunch.core.messages import CheckRequest, FromNodeZero


class CheckNode(CheckRequest, FromNodeZero, frozen=True):
    """Message from node 0: check this machine before the attempt, and wait until its GPU memory is free.

    The reply is ``CheckPassed`` or ``NodeStartError``.
    """
