"""The process between a warm zygote and one run's zygote: it sees to it that nothing of the run outlives the launcher.

It is a fork of the warm zygote, waits for the launcher and the run's zygote, whichever goes first, and does nothing
else. If it is killed the kernel ends that zygote, and the warm one sweeps.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn

CLEANUP_TIMEOUT_S = 6.0  # seconds that the run's zygote has to clean up after its launcher (over KILL_PATIENCE)


def run_guardian(
    launcher_socket: socket.socket, zygote_pid: int, channel: ModuleType, processes: ModuleType
) -> NoReturn:
    """Wait for the end of the run's ``zygote_pid``, end all that it leaves, and tell the launcher."""
    poll, woken = select.poll(), _wake_on_child()
    poll.register(woken, select.POLLIN)
    poll.register(launcher_socket, select.POLLIN)  # nothing ever comes there but its end
    if not _wait_for_end(zygote_pid, poll, woken, None):
        poll.unregister(launcher_socket)
        if not _wait_for_end(zygote_pid, poll, woken, CLEANUP_TIMEOUT_S):
            os.kill(zygote_pid, signal.SIGKILL)
            _wait_for_end(zygote_pid, poll, woken, processes.KILL_PATIENCE)
    status = os.waitpid(zygote_pid, os.WNOHANG)[1]
    stuck, _ = processes.kill_all_below(os.getpid())
    try:
        channel.send(launcher_socket, {"op": "ended", "status": status, "stuck": stuck})
    except OSError:  # the launcher has gone
        pass
    os._exit(0)


def _wake_on_child() -> int:
    """Return a descriptor that is readable once a child has ended."""
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken


def _wait_for_end(child: int, poll: select.poll, woken: int, timeout_s: float | None) -> bool:
    """Wait until ``child`` has ended; return False after ``timeout_s`` seconds, or when there is news of another kind.

    It is not reaped here, so its pid remains its own.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = dict(poll.poll(None if left_s is None else left_s * 1000))
        if woken not in ready:
            return False
        os.read(woken, 4096)
    return True
