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


class Child:
    """One child, from its start until it is reaped."""

    def __init__(self, pid: int, *, sweeps: bool = False) -> None:
        """``sweeps``: it ends what is below it itself, when we let it go."""
        self.pid, self.sweeps = pid, sweeps
        self._status: int | None = None
        _unreaped[pid] = self

    def kill(self) -> None:
        """End it, unless it is reaped."""
        if self.pid in _unreaped:
            with suppress(ProcessLookupError):  # the kernel reaps for a parent that ignores SIGCHLD
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, patience: float) -> int | None:
        """Wait for its end; killed after ``patience`` seconds. Return the wait status, None where nobody knows it."""
        if self.pid in _unreaped:
            try:
                if not processes.wait_for_end(self.pid, patience):
                    self.kill()
                self.reaped(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.reaped(None)
        return self._status

    def reaped(self, status: int | None) -> None:
        """Note that it has been reaped, by us or together with the orphans."""
        self._status = status
        del _unreaped[self.pid]


_unreaped: dict[int, Child] = {}


def kill_all_below(spare: Callable[[int], bool]) -> list[str]:
    """End all processes below us but those that ``spare`` is true for; return what cannot be killed."""

    def spares(pid: int) -> bool:
        return spare(pid) or (pid in _unreaped and _unreaped[pid].sweeps)

    stuck, ended = processes.kill_all_below(os.getpid(), spare=spares)
    for pid, status, _ in ended:
        if child := _unreaped.get(pid):
            child.reaped(status)
    return stuck
