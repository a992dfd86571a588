"""Dumps the stacks of one rank: a signal makes the rank write its stacks to a file in memory (``rank/stacks.py``).

There are two signals. On the first, a Python handler writes the stacks; it runs between two bytecodes. On the second,
faulthandler writes them at once, which is safe only while the main thread is in native code. So the second is sent to a
rank that has not replied and sleeps, or is late.

Right before each signal, /proc shows whether the process handles it: an exec clears handlers, and the signal would then
kill. A stopped process gets none: it would handle the signal long after the inspection. Nor does one in ``pause()``,
which would return; then the rank's thread reports the frames, if it has one (``rank/inspect_side.py``).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from ddplaunch.base.safe_files import list_dir
from ddplaunch.core.agent.node_ranks import RankProcess
from ddplaunch.observe.diagnosis.inspection import ProcessCondition
from ddplaunch.observe.node.system_calls import ends_at_any_signal
from ddplaunch.system.processes.proc_utils import catches_signal, contains_signal, read_signal_sets

REPLACED_ERROR = "it has been replaced by another program (exec)"
NO_SIGNAL_ERROR = "no free signal for it"
SIGNAL_WAIT_ERROR = "it waits for any signal, as in pause()"
ENDING_ERROR = "its program has ended, and Python is shutting down"
_DELIMITER = b"\0"  # before and after a dump on the first signal
_MEMFD_NAME = "/memfd:ddplaunch-stacks (deleted)"
_MAX_DUMP_BYTES = 4 << 20
_SLEEPING_DELAY_S = 0.01  # a rank that sleeps longer is in native code: Python would have woken up for the signal
_SECOND_SIGNAL_TIMEOUT_S = 0.05  # if the second signal is handled then without a dump, the program's handler got it
_RUNNING_DELAY_S = 0.12  # a rank that runs longer is in native code, and holds the GIL


class RankStackDump:
    """One dump of a rank's stacks; ``why_not``: why there is none, for users."""

    def __init__(self, process: RankProcess, signals: tuple[int, int], fd: int, condition: ProcessCondition) -> None:
        """Send the first of ``signals`` to the rank, which writes to its descriptor ``fd``."""
        self._process, self._signals, self._file = process, signals, -1
        self._proc = f"/proc/{process.pid}"
        self._sent, self._asleep = time.monotonic(), False
        self._second_sent = 0.0  # when the second signal was sent
        self.text: bytes | None = None  # once it is complete
        self.why_not = self._why_not_possible(fd, condition)
        if not self.why_not:
            process.send(signals[0])

    def _why_not_possible(self, fd: int, condition: ProcessCondition) -> str:
        if condition is ProcessCondition.STOPPED:
            return "it is stopped"
        if ends_at_any_signal(self._process.pid):
            return SIGNAL_WAIT_ERROR
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
                return "the program has closed the file for stacks"
            self._file = os.open(f"{self._proc}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, 0)
        except FileNotFoundError:
            if not os.path.exists(self._proc):
                return "it has ended"
            if caught:
                return "the program has closed the file for stacks"
            # At the end of a process the kernel closes all descriptors; an exec closes only that of the dumps.
            return REPLACED_ERROR if list_dir(f"{self._proc}/fd") else ENDING_ERROR
        except (OSError, ValueError) as error:
            return f"not permitted: {error}"
        return ""

    def poll(self) -> bool:
        """Check whether the dump is complete; return whether it is still awaited."""
        if self.text is None and not self.why_not:
            try:
                signals = read_signal_sets(self._process.pid, b"SigBlk", b"ShdPnd", b"SigPnd")
                text = os.pread(self._file, _MAX_DUMP_BYTES, 0)
            except (OSError, ValueError):
                self._finish("it has ended")
                return False
            at_once, *complete = text.split(_DELIMITER)
            if len(complete) > 1:
                self._finish(text=complete[0])
            elif not self._second_sent:
                self._maybe_send_second_signal()
            # While it writes, the signal is blocked in its thread; before that it is pending.
            elif not any(contains_signal(each, self._signals[1]) for each in signals):
                if at_once:
                    self._finish(text=at_once)
                elif not complete and time.monotonic() - self._second_sent > _SECOND_SIGNAL_TIMEOUT_S:
                    self._finish(NO_SIGNAL_ERROR)  # a handler of the program got it
        return self.text is None and not self.why_not

    def _maybe_send_second_signal(self) -> None:
        """Send the second signal, if there is one, once it is clear that Python does not handle the first."""
        if not self._signals[1]:
            return
        since, slept = time.monotonic() - self._sent, self._asleep
        with suppress(OSError), open(f"{self._proc}/task/{self._process.pid}/stat", "rb") as file:
            self._asleep = (
                file.read().rpartition(b")")[2].split()[0] in b"SD"
            )  # of the main thread: /proc/PID/stat adds up all
        if since > _RUNNING_DELAY_S or (since > _SLEEPING_DELAY_S and slept and self._asleep):
            if not catches_signal(self._process.pid, self._signals[1]):
                return self._finish("it has ended")
            self._second_sent = time.monotonic()
            self._process.send(self._signals[1])

    def give_up(self) -> None:
        """Stop waiting for the dump; keep the part that the rank has written so far, if any."""
        if self.poll():
            text = os.pread(self._file, _MAX_DUMP_BYTES, 0)
            text = text.replace(_DELIMITER, b"")
            self._finish("" if text else "it did not respond", text or None)

    def _finish(self, why_not: str = "", text: bytes | None = None) -> None:
        self.why_not, self.text = why_not, text
        os.close(self._file)
