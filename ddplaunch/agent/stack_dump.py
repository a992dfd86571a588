"""The stacks of one rank, by a signal on which it writes them to a file in memory (``rank/answers.py``).

The signal goes only to a process that catches it, as the kernel says right before: an exec clears that, and it would
kill. It does not go to one that is stopped: it would come when nobody asks any more.
"""

from __future__ import annotations

import os

from ddplaunch.agent.ranks import RankProcess
from ddplaunch.diagnosis.inspection import Condition

REPLACED = "it has become another program"
_FILE = "/memfd:ddplaunch-stacks (deleted)"
_MAX = 4 << 20  # bytes of a dump


class StackDump:
    """One dump; ``why_not`` says for people why there will be none, and is empty otherwise."""

    def __init__(self, process: RankProcess, signal: int, fd: int, condition: Condition) -> None:
        """Send ``signal`` to the rank, which writes to its descriptor ``fd``."""
        self._proc, self._signal, self._file = f"/proc/{process.pid}", signal, -1
        self.text: bytes | None = None  # once it is whole
        self.why_not = self._hindrance(fd, condition)
        if not self.why_not:
            process.send(signal)

    def _hindrance(self, fd: int, condition: Condition) -> str:
        if condition is Condition.STOPPED:
            return "it is stopped"
        if not self._signal:
            return "no signal is free for it"
        try:
            if not self._mask("SigCgt"):
                return REPLACED
            if os.readlink(f"{self._proc}/fd/{fd}") != _FILE:
                return "the program has closed the file for it"
            self._file = os.open(f"{self._proc}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, 0)
        except FileNotFoundError:
            return "the program has closed the file for it" if os.path.exists(self._proc) else "it has ended"
        except (OSError, ValueError) as error:
            return f"the system does not allow it: {error}"
        return ""

    def look(self) -> bool:
        """Look for its end; return whether it is still awaited."""
        if self.text is None and not self.why_not:
            try:
                # While it writes, the signal is blocked in its thread; before that it is pending.
                written = os.fstat(self._file).st_size
                busy = self._mask("SigBlk") or self._mask("ShdPnd") or self._mask("SigPnd")
            except (OSError, ValueError):
                self._end("it has ended")
            else:
                if written and not busy:
                    self.text = os.pread(self._file, _MAX, 0)
                    self._end()
        return self.text is None and not self.why_not

    def give_up(self) -> None:
        """Do without; what it may have written by now is taken."""
        if self.look():
            self.text = os.pread(self._file, _MAX, 0) or None
            self._end("" if self.text else "it did not answer")

    def _end(self, why_not: str = "") -> None:
        self.why_not = why_not
        os.close(self._file)

    def _mask(self, name: str) -> bool:
        """Whether the signal is in this set of the process's main thread (proc_pid_status(5))."""
        with open(f"{self._proc}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key == name:
                    return bool(int(value, 16) >> (self._signal - 1) & 1)
        raise ValueError(name)
