"""The launcher's own child processes, as opposed to the orphans that it adopts.

``kill_descendants`` reaps every process that has ended, and a reaped pid may soon be reused. So children are killed and
waited for here, where it is known whether they have been reaped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.system.processes import proc_utils


class ChildProcess:
    """A child process that the launcher started, until it is reaped."""

    def __init__(self, pid: int, *, cleans_up_itself: bool = False) -> None:
        """``cleans_up_itself``: whether the child kills its own descendants when its socket is closed."""
        self.pid, self.cleans_up_itself = pid, cleans_up_itself
        self._status: int | None = None
        _unreaped[pid] = self

    def kill(self) -> None:
        """Send SIGKILL to the child, unless it has been reaped."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal to the child, unless it has been reaped."""
        if self.pid in _unreaped:
            with suppress(ProcessLookupError):  # the kernel reaps for a parent that ignores SIGCHLD
                os.kill(self.pid, number)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the child to end; return whether it has ended."""
        return self.pid not in _unreaped or proc_utils.wait_for_end(self.pid, timeout_s)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the child to end, and kill it after ``timeout_s``. Return the wait status, None if unknown.

        For a child in uninterruptible sleep, which SIGKILL does not end, it waits KILL_TIMEOUT_S more.
        """
        if self.pid in _unreaped:
            try:
                if not proc_utils.wait_for_end(self.pid, timeout_s):
                    self.kill()
                    if not proc_utils.wait_for_end(self.pid, proc_utils.KILL_TIMEOUT_S):
                        return None
                self.on_reaped(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.on_reaped(None)
        return self._status

    def on_reaped(self, status: int | None) -> None:
        """Store the wait status of the child; called once it has been reaped, by ``wait`` or together with orphans."""
        self._status = status
        del _unreaped[self.pid]


_unreaped: dict[int, ChildProcess] = {}


def kill_descendants(is_excluded: Callable[[int], bool]) -> list[str]:
    """Kill all descendants of the launcher but the excluded ones; return those that cannot be killed."""

    def excludes(pid: int) -> bool:
        return is_excluded(pid) or (pid in _unreaped and _unreaped[pid].cleans_up_itself)

    stuck, ended = proc_utils.kill_descendants(os.getpid(), is_excluded=excludes)
    for pid, status, _ in ended:
        if child := _unreaped.get(pid):
            child.on_reaped(status)
    return stuck
