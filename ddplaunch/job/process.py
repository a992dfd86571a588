"""The process of a launcher, which is not a child of ours: when it was born, whether it is suspended or has ended."""

from __future__ import annotations

import os
import select
import time


def born(pid: int) -> int:
    """When the kernel made this process, in ticks since its own start; -1 where there is no such process."""
    fields = _stat(pid)
    return -1 if fields[0] in b"ZX" else int(fields[19])


def suspended(pid: int) -> bool:
    """Whether a signal has stopped this process: Ctrl-Z in its terminal, or SIGSTOP."""
    return _stat(pid)[0] == b"T"


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; the state "X" alone where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return [b"X"]


def ended(pid: int, seconds: float | None = None) -> bool:
    """Wait at most ``seconds`` for the end of a process, None for ever; return whether it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # an old kernel, or not Linux
        return _looked_for(pid, seconds)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))
    finally:
        os.close(fd)


def _looked_for(pid: int, seconds: float | None) -> bool:
    over = None if seconds is None else time.monotonic() + seconds
    while True:
        try:
            os.kill(pid, 0)
        except OSError:  # none, or another user's, who has that pid now
            return True
        if over is not None and time.monotonic() >= over:
            return False
        time.sleep(0.05)
