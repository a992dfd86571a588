"""A destination of output that never makes the launcher wait: our stdout and stderr, however slowly they are read."""

from __future__ import annotations

import os
import stat

from ddplaunch.loop import Callback, EventLoop, Timer
from ddplaunch.output.terminal import is_interactive
from ddplaunch.output.voice import FORMATTER, LogMessage, MessageKind

HIGH_WATER_BYTES = 4 << 20  # bytes waiting beyond which ranks are not read any further: they wait as on any full pipe
READER_TIMEOUT_S = (
    10.0  # seconds without a byte taken after which a reader is stuck: what it misses is dropped and counted
)
RETRY_S = 0.5  # between two attempts to write to a file, which a full disk refuses


class Sink:
    """One of our own descriptors. A reader that closed it, or is stuck, loses the output; the job goes on.

    A file that cannot be written, as on a full disk, is tried again: what it has not taken waits here. Only where more
    waits than there is room for, for ``READER_TIMEOUT_S`` seconds, or that long after the job's end, it is dropped.
    """

    def __init__(self, loop: EventLoop, fd: int, timeout_s: float = READER_TIMEOUT_S) -> None:
        self._loop, self._fd, self._patience = loop, _reopen(fd), timeout_s
        self._waiting = bytearray()
        self._timer: Timer | None = None
        self._retry: Timer | None = None  # of a file
        self._ending = False
        self.is_closed = self.stuck = False
        self._missed = 0
        self.error = "nobody read them"  # why lines are missing
        self.on_drained: Callback = lambda: None  # called whenever there may be room again
        self.is_terminal = is_interactive(fd)  # a person's
        self._file = not (os.isatty(fd) or _is_pipe(self._fd))

    @property
    def is_full(self) -> bool:
        return len(self._waiting) > HIGH_WATER_BYTES

    @property
    def is_drained(self) -> bool:
        """Whether all that will ever be written has been."""
        return self.is_closed or self.stuck or not self._waiting

    @property
    def lost(self) -> int:
        """How many lines a file has not taken: final once the sink is idle."""
        return self._missed + self._waiting.count(b"\n") if self._file else 0

    def end(self) -> None:
        """Wait ``READER_TIMEOUT_S`` seconds at most for a file that cannot be written: the job has ended."""
        self._ending = True
        if self._file and self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(self._patience, self._give_up)

    def write(self, data: bytes) -> None:
        """Write whole lines; what the reader does not take at once waits its turn."""
        if self.is_closed or not data:
            return
        if self.stuck:
            self._missed += data.count(b"\n")
            return
        if not self._waiting:
            data = data[self._write_some(data) :]
        if data and not self.is_closed:
            self._waiting += data
            self._continue_later()
            if self._timer is None:
                self._timer = self._loop.call_later(self._patience, self._give_up)

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
            if self._file:  # ENOSPC, EDQUOT, EIO of a network's file system: there may be room again
                self.error = error.strerror or str(error)
                return done
            self.is_closed = True  # EPIPE from `| head`, EIO from a terminal that has gone: nothing reads any more
            self._unwatch()  # which no view of what is waiting may outlive
            return whole
        return done

    def _continue_later(self) -> None:
        if not self._file:
            self._loop.watch_fd(self._fd, self._on_writable, write=True)
        elif self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._on_writable)

    def _on_writable(self) -> None:
        self._retry = None
        done = self._write_some(self._waiting)
        del self._waiting[:done]
        if self.stuck and done:
            self.stuck = False
            text = f"{self._missed} lines are missing here: {self.error} for {self._patience:.0f} s"
            self._missed = 0
            self._waiting += FORMATTER.format(
                LogMessage(MessageKind.NOTE, text, human_text=f"[ddplaunch] {text}\n")
            ).encode()
        if not self._waiting:
            self._unwatch()
        elif not self.is_closed:
            self._continue_later()
            if done and self._timer is not None:
                self._timer.cancel()
                self._timer = self._loop.call_later(self._patience, self._give_up)
        self.on_drained()

    def _give_up(self) -> None:
        """Keep the line that has begun, drop the others; go on trying, in case the reader comes back."""
        self._timer = None
        if self._file and not (self.is_full or self._ending):
            self._timer = self._loop.call_later(self._patience, self._give_up)
        elif self._waiting:
            self.stuck = True
            end = self._waiting.find(b"\n") + 1 or len(self._waiting)
            self._missed += self._waiting.count(b"\n", end)
            del self._waiting[end:]
        self.on_drained()

    def _unwatch(self) -> None:
        self._waiting.clear()
        self._loop.unwatch_fd(self._fd)
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry = None


def _is_pipe(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _reopen(fd: int) -> int:
    """Open the pipe or terminal behind ``fd`` once more, so that O_NONBLOCK is ours alone and not our neighbours'.

    A file never makes anyone wait and has an offset to share, so it is used as it is.
    """
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            return os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        if stat.S_ISSOCK(mode):
            copy = os.dup(fd)
            os.set_blocking(copy, False)
            return copy
    except OSError:
        pass
    return fd
