"""The signals that come to the launcher, and what they ask of the job: a warning, an end, impatience.

Those that ask nothing of it are for the ranks (``control.relay``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.control.messages import PreemptionNotice, StopRequested
from ddplaunch.control.relay import DUPLICATE_WINDOW_S

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""What we act on, if we did not inherit it as ignored."""

ZYGOTE_REPORT_DELAY_S = 0.3  # seconds after a signal in which the zygote has told whether it came to every process here

DOUBLE_PRESS_WINDOW_S = 2.0  # seconds in which a second Ctrl-\ stops the job


class InspectKey:
    """Ctrl-\\ where a person sits: it asks what the ranks do, and stops the job where it soon comes again."""

    def __init__(self) -> None:
        self._asked = -DOUBLE_PRESS_WINDOW_S

    def is_inspect_request(self, number: int) -> bool:
        """Take in a signal; return whether it is that, and the first."""
        if number != signal.SIGQUIT or not os.isatty(2):
            return False
        before, self._asked = self._asked, time.monotonic()
        return self._asked - before > DOUBLE_PRESS_WINDOW_S


class GroupSignalTracker:
    """Signals for the ranks that came to every process below us: to them by the same way, and not to be passed on.

    So does Slurm signal a step where it follows trees of processes (proctrack/linuxproc). The zygote hears them too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._came: list[tuple[int, float]] = []

    def record(self, number: int) -> None:
        self._came.append((number, self._clock()))

    def was_seen(self, number: int) -> bool:
        """Whether such a signal came lately."""
        self._came = [each for each in self._came if self._clock() - each[1] < 3 * DUPLICATE_WINDOW_S]
        return any(each[0] == number for each in self._came)

    def consume(self, number: int) -> bool:
        """Return whether one came, and forget it."""
        if found := self.was_seen(number):
            del self._came[[each[0] for each in self._came].index(number)]
        return found


class LauncherSignals:
    """What has come so far; ``interrupted``: whether somebody wants the job to end."""

    def __init__(self, warning: int | None) -> None:
        """``warning`` is the scheduler's signal before a preemption, None where none is listened for."""
        self._warning = warning
        self._warned = False
        self._key = InspectKey()
        self.interrupted = False

    def is_inspect_request(self, number: int) -> bool:
        """Take in a signal; return whether it asks what the ranks do."""
        return not self.interrupted and self._key.is_inspect_request(number)

    def interpret(self, number: int, reason: str = "") -> PreemptionNotice | StopRequested:
        """Take in a signal; return what it means. One of ``STOP_SIGNALS`` is a warning only the first time.

        ``reason``: a rank has sent it, to end the job.
        """
        if not reason and number == self._warning and (not self._warned or number not in STOP_SIGNALS):
            self._warned = True
            return PreemptionNotice(number)
        # SIGTERM twice is patient: a preempted job of Slurm gets it when its grace begins and when that is over.
        again = self.interrupted and number in (signal.SIGINT, signal.SIGQUIT)
        self.interrupted = True
        return StopRequested(number, again, reason)


def is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal; False where the system does not tell."""
    with suppress(OSError, ValueError):
        return contains_signal(read_signal_sets(pid, b"SigCgt")[0], number)
    return False


def read_signal_sets(pid: int, *names: bytes) -> list[int]:
    """Sets of signals in what the kernel says of a process (proc_pid_status(5)), a bit each; quickly, for many ranks.

    Raises OSError where it is gone, ValueError where the kernel does not tell.
    """
    with open(f"/proc/{pid}/status", "rb", 0) as file:
        status = file.read()
    starts = [status.index(name) + len(name) + 1 for name in names]
    return [int(status[start : status.index(b"\n", start)], 16) for start in starts]


def contains_signal(signals: int, number: int) -> bool:
    """Whether a signal is in one of these sets."""
    return bool(signals >> (number - 1) & 1)
