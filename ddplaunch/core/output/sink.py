"""Non-blocking writer for the launcher's stdout and stderr, however slowly they are read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ddplaunch.base.event_loop import Callback, EventLoop, Timer
from ddplaunch.base.tty import is_interactive
from ddplaunch.core.output.log_message import FORMATTER, LogMessage, MessageKind

HIGH_WATER_BYTES = 4 << 20  # unwritten bytes above which the ranks' pipes are not read: ranks block, as on a full pipe
READER_TIMEOUT_S = 10.0  # a reader that takes no byte for this long is stuck: output is dropped, and counted
RETRY_S = 0.5  # between two attempts to write to a file on a full disk


class Sink:
    """The launcher's stdout or stderr. If the reader has closed it or is stuck, output is dropped; the job continues.

    Writes to a file that fail, as on a full disk, are retried, and the output is buffered. It is dropped only after
    ``READER_TIMEOUT_S`` with a full buffer, or that long after the job's end.
    """

    def __init__(self, loop: EventLoop, fd: int, timeout_s: float = READER_TIMEOUT_S) -> None:
        self._loop, self._timeout_s = loop, timeout_s
        self._fd, self._is_file = _reopen(fd)
        self._unwritten = bytearray()
        self._timer: Timer | None = None
        self._retry: Timer | None = None  # for files
        self._ending = False
        self.is_closed = self.stuck = False
        self._dropped_lines = 0
        self.error = "not read"  # why lines are missing
        self.on_drained: Callback = lambda: None  # called whenever there may be room again
        self.is_terminal = is_interactive(fd)

    @property
    def is_full(self) -> bool:
        return len(self._unwritten) > HIGH_WATER_BYTES

    @property
    def is_drained(self) -> bool:
        """Whether there is nothing left to write, or nothing more can be written."""
        return self.is_closed or self.stuck or not self._unwritten

    @property
    def lost_line_count(self) -> int:
        """The number of lines not written to a file; final once the sink is drained."""
        return self._dropped_lines + self._unwritten.count(b"\n") if self._is_file else 0

    def end(self) -> None:
        """Called when the job has ended: from now on, retry failed writes to a file only for the timeout."""
        self._ending = True
        if self._is_file and self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(self._timeout_s, self._drop_unwritten)

    def write(self, data: bytes) -> None:
        """Write complete lines; buffer what cannot be written at once."""
        if self.is_closed or not data:
            return
        if self.stuck:
            self._dropped_lines += data.count(b"\n")
            return
        if not self._unwritten:
            data = data[self._write_some(data) :]
        if data and not self.is_closed:
            self._unwritten += data
            self._schedule_write()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout_s, self._drop_unwritten)

    def _write_some(self, data: bytes | bytearray) -> int:
        done, whole = 0, len(data)
        try:
            with memoryview(data) as view:
                while done < whole:
                    with view[done : done + (1 << 18)] as chunk:
                        done += os.write(self._fd, chunk)
        except BlockingIOError:
            pass
        except OSError as error:
            if self._is_file:  # ENOSPC, EDQUOT, EIO of a network file system: there may be room again
                self.error = error.strerror or str(error)
                return done
            self.is_closed = True  # EPIPE from `| head`, EIO from a terminal that is gone: there is no reader any more
            self._stop_writing()  # clears the buffer, so its views are released first
            return whole
        return done

    def _schedule_write(self) -> None:
        if not self._is_file:
            self._loop.watch_fd(self._fd, self._on_writable, write=True)
        elif self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._on_writable)

    def _on_writable(self) -> None:
        self._retry = None
        done = self._write_some(self._unwritten)
        del self._unwritten[:done]
        if self.stuck and done:
            self.stuck = False
            text = f"{self._dropped_lines} lines are missing here: {self.error} for {self._timeout_s:.0f} s"
            self._dropped_lines = 0
            self._unwritten += FORMATTER.format(
                LogMessage(MessageKind.NOTE, text, human_text=f"[ddplaunch] {text}\n")
            ).encode()
        if not self._unwritten:
            self._stop_writing()
        elif not self.is_closed:
            self._schedule_write()
            if done and self._timer is not None:
                self._timer.cancel()
                self._timer = self._loop.call_later(self._timeout_s, self._drop_unwritten)
        self.on_drained()

    def _drop_unwritten(self) -> None:
        """Drop all but the line that is partly written; keep trying, in case the reader comes back."""
        self._timer = None
        if self._is_file and not (self.is_full or self._ending):
            self._timer = self._loop.call_later(self._timeout_s, self._drop_unwritten)
        elif self._unwritten:
            self.stuck = True
            end = self._unwritten.find(b"\n") + 1 or len(self._unwritten)
            self._dropped_lines += self._unwritten.count(b"\n", end)
            del self._unwritten[end:]
        self.on_drained()

    def _stop_writing(self) -> None:
        self._unwritten.clear()
        self._loop.unwatch_fd(self._fd)
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry = None


def _reopen(fd: int) -> tuple[int, bool]:
    """Reopen the pipe or terminal behind ``fd``: O_NONBLOCK belongs to the open file, which other processes share.

    A file never blocks, and its offset must stay shared, so it is used as it is. Return the descriptor to use, and
    whether it is a file.
    """
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return fd, True
    is_socket = stat.S_ISSOCK(mode)
    if not (is_socket or stat.S_ISFIFO(mode) or os.isatty(fd)):
        return fd, True
    with suppress(OSError):
        if not is_socket:
            return os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), False
        copy = os.dup(fd)
        os.set_blocking(copy, False)
        return copy, False
    return fd, False
