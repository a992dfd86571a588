"""The processes that we start and wait for ourselves, beside all the orphans that we adopt.

When everything below us is killed, every process that has ended is reaped, and its pid may soon be another's. So
children of ours are ended and waited for here, where it is known whether the pid is still the child's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.rank import processes


class ChildProcess:
    """One child, from its start until it is reaped."""

    def __init__(self, pid: int, *, cleans_up_itself: bool = False) -> None:
        """``cleans_up_itself``: it ends what is below it itself, when we let it go."""
        self.pid, self.sweeps = pid, cleans_up_itself
        self._status: int | None = None
        _unreaped[pid] = self

    def kill(self) -> None:
        """End it, unless it is reaped."""
        if self.pid in _unreaped:
            with suppress(ProcessLookupError):  # the kernel reaps for a parent that ignores SIGCHLD
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; killed after ``timeout_s`` seconds. Return the wait status, None where nobody knows it."""
        if self.pid in _unreaped:
            try:
                if not processes.wait_for_end(self.pid, timeout_s):
                    self.kill()
                self.on_reaped(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.on_reaped(None)
        return self._status

    def on_reaped(self, status: int | None) -> None:
        """Note that it has been reaped, by us or together with the orphans."""
        self._status = status
        del _unreaped[self.pid]


_unreaped: dict[int, ChildProcess] = {}


def kill_descendants(is_excluded: Callable[[int], bool]) -> list[str]:
    """End all processes below us but those that ``is_excluded`` is true for; return what cannot be killed."""

    def spares(pid: int) -> bool:
        return is_excluded(pid) or (pid in _unreaped and _unreaped[pid].sweeps)

    stuck, ended = processes.kill_descendants(os.getpid(), is_excluded=spares)
    for pid, status, _ in ended:
        if child := _unreaped.get(pid):
            child.on_reaped(status)
    return stuck
