"""The process between a warm zygote and one run's zygote: it sees to it that nothing of the run outlives the launcher.

It is a fork of the warm zygote, waits for the launcher and the run's zygote, whichever goes first, and does nothing
else. If it is killed the kernel ends that zygote, and the warm one sweeps.
"""

from __future__ import annotations

import os
import select
import signal
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn

LEAVE_PATIENCE = 6.0  # seconds that the run's zygote has to clean up after its launcher (over KILL_PATIENCE)


def guard(line: socket.socket, zygote: int, channel: ModuleType, processes: ModuleType) -> NoReturn:
    """Wait for the end of the run's ``zygote``, end all that it leaves, and tell the launcher."""
    pidfd = os.pidfd_open(zygote)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(line, select.POLLIN)  # nothing ever comes there but its end
    if pidfd not in dict(poll.poll()):
        poll.unregister(line)
        if not poll.poll(LEAVE_PATIENCE * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll.poll(processes.KILL_PATIENCE * 1000)
    status = os.waitpid(zygote, os.WNOHANG)[1]
    stuck, _ = processes.kill_all_below(os.getpid())
    try:
        channel.send(line, {"op": "ended", "status": status, "stuck": stuck})
    except OSError:  # the launcher has gone
        pass
    os._exit(0)
