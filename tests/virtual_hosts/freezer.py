"""Freezes all processes of a host at one moment."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Freezer:
    """Freezes processes with SIGSTOP, which a program cannot catch."""

    def __init__(self) -> None:
        self._frozen: set[int] = set()

    def freeze(self, processes: Callable[[], list[int]]) -> None:
        """Freeze all ``processes()``, also those that they start in the meantime."""
        while new := set(processes()) - self._frozen:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            self._frozen |= new
        while any(map(_runs, self._frozen)):
            time.sleep(0.001)  # each thread stops when it gets to it, and nothing tells us

    def thaw(self) -> None:
        """Let them run again."""
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._frozen.clear()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it ended
        os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Whether any of its threads is neither stopped nor at its end."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_bytes().rpartition(b")")[2].split()[0] for thread in threads]
    except OSError:
        return Path(f"/proc/{pid}").exists()  # a thread of it ended, or all
    return any(state not in (b"T", b"t", b"Z", b"X") for state in states)
