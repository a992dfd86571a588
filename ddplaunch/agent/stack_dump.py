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
from ddplaunch.agent.signals import catches, has, signal_sets
from ddplaunch.diagnosis.inspection import Condition

REPLACED = "it has become another program"
TAKEN = "no signal is free for it"
ENDING = "its program is over, and Python takes down what it left"
_MARK = b"\0"  # before and after what Python writes on the first signal
_FILE = "/memfd:ddplaunch-stacks (deleted)"
_MAX = 4 << 20  # bytes of a dump
_ASLEEP = 0.01  # seconds after which one that sleeps is in native code: Python would have woken up for the signal
_UNHEARD = 0.05  # seconds after the second signal: it is neither pending nor in its handler, and nothing is written
_LATE = 0.12  # seconds after which one that runs is: it holds the GIL


class StackDump:
    """One dump; ``why_not`` says for people why there will be none, and is empty otherwise."""

    def __init__(self, process: RankProcess, signals: tuple[int, int], fd: int, condition: Condition) -> None:
        """Send the first of ``signals`` to the rank, which writes to its descriptor ``fd``."""
        self._process, self._signals, self._file = process, signals, -1
        self._proc = f"/proc/{process.pid}"
        self._sent, self._asleep = time.monotonic(), False
        self._at_once = 0.0  # when the second signal has been sent, too
        self.text: bytes | None = None  # once it is whole
        self.why_not = self._hindrance(fd, condition)
        if not self.why_not:
            process.send(signals[0])

    def _hindrance(self, fd: int, condition: Condition) -> str:
        if condition is Condition.STOPPED:
            return "it is stopped"
        if not self._signals[0]:
            return TAKEN
        caught = False
        try:
            signals = signal_sets(self._process.pid, b"SigCgt")[0]
            caught = all(has(signals, number) for number in self._signals if number)
            if not caught:
                left = os.readlink(f"{self._proc}/fd/{fd}") == _FILE  # an exec would have closed it
                return ENDING if left else REPLACED
            if os.readlink(f"{self._proc}/fd/{fd}") != _FILE:
                return "the program has closed the file for it"
            self._file = os.open(f"{self._proc}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, 0)
        except FileNotFoundError:
            if not os.path.exists(self._proc):
                return "it has ended"
            if caught:
                return "the program has closed the file for it"
            return REPLACED if self._has_files() else ENDING  # at its end the kernel closes all, an exec only ours
        except (OSError, ValueError) as error:
            return f"the system does not allow it: {error}"
        return ""

    def _has_files(self) -> bool:
        try:
            return bool(os.listdir(f"{self._proc}/fd"))
        except OSError:
            return False

    def look(self) -> bool:
        """Look for its end; return whether it is still awaited."""
        if self.text is None and not self.why_not:
            try:
                taken = signal_sets(self._process.pid, b"SigBlk", b"ShdPnd", b"SigPnd")
                text = os.pread(self._file, _MAX, 0)
            except (OSError, ValueError):
                self._end("it has ended")
                return False
            at_once, *by_python = text.split(_MARK)
            if len(by_python) > 1:
                self._end(text=by_python[0])
            elif not self._at_once:
                self._wait()
            # While it writes, the signal is blocked in its thread; before that it is pending.
            elif not any(has(each, self._signals[1]) for each in taken):
                if at_once:
                    self._end(text=at_once)
                elif not by_python and time.monotonic() - self._at_once > _UNHEARD:
                    self._end(TAKEN)  # the program's own handler has had it
        return self.text is None and not self.why_not

    def _wait(self) -> None:
        """Send the second signal, if it is free, once it is clear that Python does not come to the first."""
        if not self._signals[1]:
            return
        since, slept = time.monotonic() - self._sent, self._asleep
        with suppress(OSError), open(f"{self._proc}/task/{self._process.pid}/stat", "rb") as file:
            self._asleep = file.read().rpartition(b")")[2].split()[0] in b"SD"  # of that thread: /stat adds all up
        if since > _LATE or (since > _ASLEEP and slept and self._asleep):
            if not catches(self._process.pid, self._signals[1]):
                return self._end("it has ended")
            self._at_once = time.monotonic()
            self._process.send(self._signals[1])

    def give_up(self) -> None:
        """Do without; what it may have written by now is taken."""
        if self.look():
            text = os.pread(self._file, _MAX, 0)
            text = text.replace(_MARK, b"")
            self._end("" if text else "it did not answer", text or None)

    def _end(self, why_not: str = "", text: bytes | None = None) -> None:
        self.why_not, self.text = why_not, text
        os.close(self._file)
