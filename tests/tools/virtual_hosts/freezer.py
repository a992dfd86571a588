"""Freezes all processes of a host."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def freeze(processes: Callable[[], list[int]]) -> None:
    """Freeze all ``processes()`` with SIGSTOP, which a program cannot catch; also those that they start meanwhile."""
    frozen = set[int]()
    while new := set(processes()) - frozen:
        send_signal(signal.SIGSTOP, new)
        frozen |= new
    while any(map(_runs, frozen)):
        time.sleep(0.001)  # each thread stops when it is scheduled, and nothing reports that


def send_signal(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it ended
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Whether any of its threads is neither stopped nor ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_bytes().rpartition(b")")[2].split()[0] for thread in threads]
    except OSError:
        return Path(f"/proc/{pid}").exists()  # a thread of it ended, or all
    return any(state not in (b"T", b"t", b"Z", b"X") for state in states)
