"""The guardian: the process between a warm zygote and a run's zygote, which kills what would outlive the launcher.

A fork of the warm zygote that only waits for the end of the launcher or of the run's zygote. If it is killed itself,
the kernel kills the run's zygote (parent-death signal), and the warm zygote sweeps.
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

CLEANUP_TIMEOUT_S = 6.0  # for the run's zygote to clean up after its launcher's end; more than KILL_TIMEOUT_S


def run_guardian(
    launcher_socket: socket.socket, zygote_pid: int, channel: ModuleType, processes: ModuleType
) -> NoReturn:
    """Wait for the end of the run's zygote, kill what it leaves, and notify the launcher."""
    poll, (woken, _) = select.poll(), processes.open_wakeup_pipe()
    signal.signal(signal.SIGCHLD, processes.on_signal_noop)
    poll.register(woken, select.POLLIN)
    poll.register(launcher_socket, select.POLLIN)  # no data ever arrives there, only the end of file
    if not _wait_for_end(zygote_pid, poll, woken, None):
        poll.unregister(launcher_socket)
        if not _wait_for_end(zygote_pid, poll, woken, CLEANUP_TIMEOUT_S):
            os.kill(zygote_pid, signal.SIGKILL)
            _wait_for_end(zygote_pid, poll, woken, processes.KILL_TIMEOUT_S)
    status = os.waitpid(zygote_pid, os.WNOHANG)[1]
    stuck, _ = processes.kill_descendants(os.getpid())
    try:
        channel.send_message(launcher_socket, {"op": "guardian_exited", "status": status, "stuck": stuck})
    except OSError:  # the launcher has ended
        pass
    os._exit(0)


def _wait_for_end(child: int, poll: select.poll, woken: int, timeout_s: float | None) -> bool:
    """Wait until ``child`` has ended; return False after ``timeout_s``, or when another descriptor is ready.

    The child is not reaped here (WNOWAIT), so that its pid is not reused.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = dict(poll.poll(None if left_s is None else left_s * 1000))
        if woken not in ready:
            return False
        os.read(woken, 4096)
    return True
