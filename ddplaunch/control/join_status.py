"""Which nodes have joined, in words: the line that people see while the job waits for its nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ddplaunch.control.messages import MAX_NAMED, JoinStatus


def join_status(
    present: Collection[int], min_nodes: int, max_nodes: int, window: float | None, kind: Literal["node", "task"]
) -> JoinStatus:
    """Count the nodes that are ``present``; ``window`` and ``kind`` as in ``JoinStatus``."""
    missing = [number for number in range(max_nodes) if number not in present]
    return JoinStatus(len(present), min_nodes, max_nodes, tuple(missing[:MAX_NAMED]), window, kind)


def describe(status: JoinStatus) -> str:
    """Say it without the time: "2/4 nodes joined, waiting for node 2, 3"."""
    count = f"{status.joined}/{status.max_nodes}"
    if status.min_nodes < status.max_nodes:
        count = f"{status.joined} of {status.min_nodes} to {status.max_nodes}"
    unnamed = status.max_nodes - status.joined - len(status.missing)
    names = ", ".join(map(str, status.missing)) + (f" and {unnamed} more" if unnamed > 0 else "")
    joined, missing = f"{count} {status.kind}s joined", f"{status.kind} {names}"
    if status.window is not None:
        return f"{joined}, starting in {status.window:.0f} s unless {missing} comes before"
    return f"{joined}, waiting for {missing}"
