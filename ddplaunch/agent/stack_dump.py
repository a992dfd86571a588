"""The stacks of one rank, by a signal on which it writes them to a file in memory (``rank/answers.py``).

There are two: on the first Python writes when it comes to it, on the second at once, which is safe only while the main
thread is in native code. So the second goes to a rank that sleeps without having answered, or is late.

A signal goes only to a process that catches it, as the kernel says right before: an exec clears that, and it would
kill. It does not go to one that is stopped: it would come when nobody asks any more.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from ddplaunch.agent.ranks import RankProcess
from ddplaunch.agent.signals import contains_signal, is_caught, read_signal_sets
from ddplaunch.diagnosis.inspection import ProcessCondition

REPLACED_ERROR = "it has become another program"
NO_SIGNAL_ERROR = "no signal is free for it"
ENDING_ERROR = "its program is over, and Python takes down what it left"
_DELIMITER = b"\0"  # before and after what Python writes on the first signal
_MEMFD_NAME = "/memfd:ddplaunch-stacks (deleted)"
_MAX_DUMP_BYTES = 4 << 20  # bytes of a dump
_SLEEPING_DELAY_S = (
    0.01  # seconds after which one that sleeps is in native code: Python would have woken up for the signal
)
_SECOND_SIGNAL_TIMEOUT_S = (
    0.05  # seconds after the second signal: it is neither pending nor in its handler, and nothing is written
)
_RUNNING_DELAY_S = 0.12  # seconds after which one that runs is: it holds the GIL


class RankStackDump:
    """One dump; ``why_not`` says for people why there will be none, and is empty otherwise."""

    def __init__(self, process: RankProcess, signals: tuple[int, int], fd: int, condition: ProcessCondition) -> None:
        """Send the first of ``signals`` to the rank, which writes to its descriptor ``fd``."""
        self._process, self._signals, self._file = process, signals, -1
        self._proc = f"/proc/{process.pid}"
        self._sent, self._asleep = time.monotonic(), False
        self._at_once = 0.0  # when the second signal has been sent, too
        self.text: bytes | None = None  # once it is whole
        self.why_not = self._why_not_possible(fd, condition)
        if not self.why_not:
            process.send(signals[0])

    def _why_not_possible(self, fd: int, condition: ProcessCondition) -> str:
        if condition is ProcessCondition.STOPPED:
            return "it is stopped"
        if not self._signals[0]:
            return NO_SIGNAL_ERROR
        caught = False
        try:
            signals = read_signal_sets(self._process.pid, b"SigCgt")[0]
            caught = all(contains_signal(signals, number) for number in self._signals if number)
            if not caught:
                left = os.readlink(f"{self._proc}/fd/{fd}") == _MEMFD_NAME  # an exec would have closed it
                return ENDING_ERROR if left else REPLACED_ERROR
            if os.readlink(f"{self._proc}/fd/{fd}") != _MEMFD_NAME:
                return "the program has closed the file for it"
            self._file = os.open(f"{self._proc}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, 0)
        except FileNotFoundError:
            if not os.path.exists(self._proc):
                return "it has ended"
            if caught:
                return "the program has closed the file for it"
            return (
                REPLACED_ERROR if self._has_memfd() else ENDING_ERROR
            )  # at its end the kernel closes all, an exec only ours
        except (OSError, ValueError) as error:
            return f"the system does not allow it: {error}"
        return ""

    def _has_memfd(self) -> bool:
        try:
            return bool(os.listdir(f"{self._proc}/fd"))
        except OSError:
            return False

    def poll(self) -> bool:
        """Look for its end; return whether it is still awaited."""
        if self.text is None and not self.why_not:
            try:
                taken = read_signal_sets(self._process.pid, b"SigBlk", b"ShdPnd", b"SigPnd")
                text = os.pread(self._file, _MAX_DUMP_BYTES, 0)
            except (OSError, ValueError):
                self._finish("it has ended")
                return False
            at_once, *by_python = text.split(_DELIMITER)
            if len(by_python) > 1:
                self._finish(text=by_python[0])
            elif not self._at_once:
                self._maybe_send_second()
            # While it writes, the signal is blocked in its thread; before that it is pending.
            elif not any(contains_signal(each, self._signals[1]) for each in taken):
                if at_once:
                    self._finish(text=at_once)
                elif not by_python and time.monotonic() - self._at_once > _SECOND_SIGNAL_TIMEOUT_S:
                    self._finish(NO_SIGNAL_ERROR)  # the program's own handler has had it
        return self.text is None and not self.why_not

    def _maybe_send_second(self) -> None:
        """Send the second signal, if it is free, once it is clear that Python does not come to the first."""
        if not self._signals[1]:
            return
        since, slept = time.monotonic() - self._sent, self._asleep
        with suppress(OSError), open(f"{self._proc}/task/{self._process.pid}/stat", "rb") as file:
            self._asleep = file.read().rpartition(b")")[2].split()[0] in b"SD"  # of that thread: /stat adds all up
        if since > _RUNNING_DELAY_S or (since > _SLEEPING_DELAY_S and slept and self._asleep):
            if not is_caught(self._process.pid, self._signals[1]):
                return self._finish("it has ended")
            self._at_once = time.monotonic()
            self._process.send(self._signals[1])

    def give_up(self) -> None:
        """Do without; what it may have written by now is taken."""
        if self.poll():
            text = os.pread(self._file, _MAX_DUMP_BYTES, 0)
            text = text.replace(_DELIMITER, b"")
            self._finish("" if text else "it did not answer", text or None)

    def _finish(self, why_not: str = "", text: bytes | None = None) -> None:
        self.why_not, self.text = why_not, text
        os.close(self._file)
