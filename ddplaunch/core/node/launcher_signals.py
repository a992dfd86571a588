"""The signals that the launcher receives, and their meaning: a preemption notice, a stop request, an inspection.

Other signals are forwarded to the ranks (``core/job/signal_forwarding.py``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.core.job.signal_forwarding import DUPLICATE_WINDOW_S, STOP_SIGNALS
from ddplaunch.core.messages import PreemptionNotice, StopRequested

ZYGOTE_REPORT_DELAY_S = 0.3  # after a signal, until the zygote has reported whether it got it too

DOUBLE_PRESS_WINDOW_S = 2.0  # a second Ctrl-\ within it stops the job


class InspectKey:
    """Ctrl-\\ in a terminal: the first requests an inspection of the ranks, a second one soon after stops the job."""

    def __init__(self) -> None:
        self._last_press = -DOUBLE_PRESS_WINDOW_S

    def is_inspect_request(self, number: int) -> bool:
        """Handle a signal; return whether it is the first Ctrl-\\."""
        if number != signal.SIGQUIT or not os.isatty(2):
            return False
        before, self._last_press = self._last_press, time.monotonic()
        return self._last_press - before > DOUBLE_PRESS_WINDOW_S


class BroadcastSignalFilter:
    """Signals that were sent to every process of the job, ranks included: the launcher must not forward them.

    Slurm signals a step like that where it tracks process trees (proctrack/linuxproc). The zygote gets them too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded: list[tuple[int, float]] = []

    def record(self, number: int) -> None:
        self._recorded.append((number, self._clock()))

    def was_seen(self, number: int) -> bool:
        """Whether this signal was recorded within the last moments."""
        self._recorded = [each for each in self._recorded if self._clock() - each[1] < 3 * DUPLICATE_WINDOW_S]
        return any(each[0] == number for each in self._recorded)

    def consume(self, number: int) -> bool:
        """Return whether this signal was recorded, and remove it."""
        if found := self.was_seen(number):
            del self._recorded[[each[0] for each in self._recorded].index(number)]
        return found


class LauncherSignals:
    """The signals received so far; ``interrupted``: whether a stop was requested."""

    def __init__(self, preempt_signal: int | None) -> None:
        """``preempt_signal``: the scheduler's preemption signal, if any."""
        self._preempt_signal = preempt_signal
        self._preempted = False
        self._key = InspectKey()
        self.interrupted = False

    def is_inspect_request(self, number: int) -> bool:
        """Handle a signal; return whether it requests an inspection."""
        return not self.interrupted and self._key.is_inspect_request(number)

    def interpret(self, number: int, reason: str = "") -> PreemptionNotice | StopRequested:
        """Handle a signal; return its meaning. One of ``STOP_SIGNALS`` is a preemption notice only the first time.

        ``reason``: the source of a stop request that is not a signal to the launcher.
        """
        if not reason and number == self._preempt_signal and (not self._preempted or number not in STOP_SIGNALS):
            self._preempted = True
            return PreemptionNotice(number)
        # A second SIGTERM does not shorten the grace: Slurm sends it when the grace of a preempted job begins and ends.
        again = self.interrupted and number in (signal.SIGINT, signal.SIGQUIT)
        self.interrupted = True
        return StopRequested(number, again, reason)


def is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal; False if unknown."""
    with suppress(OSError, ValueError):
        return contains_signal(read_signal_sets(pid, b"SigCgt")[0], number)
    return False


def read_signal_sets(pid: int, *names: bytes) -> list[int]:
    """Read signal sets of a process as bit masks (proc_pid_status(5)); fast, for many ranks.

    Raises:
        OSError: the process is gone.
        ValueError: the kernel does not have them.
    """
    with open(f"/proc/{pid}/status", "rb", 0) as file:
        status = file.read()
    starts = [status.index(name) + len(name) + 1 for name in names]
    return [int(status[start : status.index(b"\n", start)], 16) for start in starts]


def contains_signal(signals: int, number: int) -> bool:
    """Whether a signal is in such a set."""
    return bool(signals >> (number - 1) & 1)
