"""One rank's process as the supervisor knows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from ddplaunch.plan.layout import Rank


@dataclass
class RankProcess:
    rank: Rank
    pid: int
    pidfd: int | None
    signalled: bool = False
    finished: bool = False  # rank 0 has done its work and only holds the store

    def stop(self, number: int) -> None:
        """Tell it to end; one that is stopped handles nothing."""
        self.signalled = True
        self.send(number)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        try:
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def suspend(ranks: Iterable[RankProcess]) -> None:
    """Stop and continue ranks with us (Ctrl-Z): they are in sessions of their own."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in ranks:
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                process.send(number)
        if number == signal.SIGSTOP:
            os.kill(os.getpid(), signal.SIGSTOP)
