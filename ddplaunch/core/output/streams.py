"""Captures the output of ranks and programs by pipes, for log files, for the screen, and a tail of it in memory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec import Struct, field

from ddplaunch.base.event_loop import Callback, EventLoop
from ddplaunch.base.safe_files import open_for_writing
from ddplaunch.core.output.line_assembler import LineAssembler
from ddplaunch.core.output.screen import Screen, Source
from ddplaunch.core.output.times import Mark, OutputTimes
from ddplaunch.core.output.traceback_filter import EXIT_TIMEOUT_S, TracebackFilter

PIPE_BYTES = 1 << 18  # a rank blocks with this much unread (F_SETPIPE_SZ; the kernel's default is 64 KiB)
REPORTED = 1 << 16  # bytes of each rank's last output in memory, for the failure report: native frames may come last
MEMORY_TAIL_BYTES = 1 << 18  # the same for a rank without a log file
MAX_BEGUN = 4096  # bytes; an unfinished line that is longer gets the time of its end, not of its start
MAX_REPEATED = 1 << 16  # bytes of a rank's first output that are compared with its output after it has started over


class TailBuffer:
    """The last ``limit`` bytes of a stream, with a count of all bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0  # bytes added so far
        self._data = bytearray()  # up to a quarter more than the limit, so that few additions move it

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self._data += data
        if len(self._data) > self.limit + self.limit // 4:
            del self._data[: -self.limit]

    def last(self, count: int) -> bytes:
        """The last ``count`` bytes, or as many as there are, at most ``limit``."""
        return bytes(self._data[max(0, len(self._data) - min(count, self.limit)) :])

    @property
    def line_start_offset(self) -> int:
        """The offset where the unfinished line begins; without one, where the next byte goes."""
        last = self.last(MAX_BEGUN)
        end = max(last.rfind(b"\n"), last.rfind(b"\r")) + 1
        return self.total - len(last) + end if end or len(last) == self.total else self.total


class _OpenStream(Struct):
    source: Source
    number: int
    fd: int
    show: bool
    on_output: Callback = lambda: None
    lines: LineAssembler = field(default_factory=LineAssembler)
    tracebacks: TracebackFilter | None = None  # shortens tracebacks of secondary failures
    received: int = 0  # bytes read so far
    first: bytearray = field(default_factory=bytearray)  # the first of them
    repeated: bytes = b""  # what the rank, which has started over, is expected to print again
    repeated_more: int = 0  # how many bytes are expected after that, which are not compared

    def drop_repeated(self, data: bytes) -> bytes:
        """Count the data of a rank and return it without the part that the rank had printed before it started over."""
        self.received += len(data)
        self.first += data[: MAX_REPEATED - len(self.first)]
        if not self.repeated:
            dropped = min(len(data), self.repeated_more)
            self.repeated_more -= dropped
            return data[dropped:]
        pairs = zip(data, self.repeated, strict=False)
        same = next((n for n, (new, old) in enumerate(pairs) if new != old), min(len(data), len(self.repeated)))
        if same < min(len(data), len(self.repeated)):  # it prints something else
            self.repeated, self.repeated_more = b"", 0
            return data[same:]
        self.repeated = self.repeated[same:]
        dropped = min(len(data) - same, self.repeated_more)
        self.repeated_more -= dropped
        return data[same + dropped :]


class OutputHandler(Protocol):
    """Receives notifications about the output of ranks."""

    def on_output(self, rank: int) -> None:
        """Called whenever a rank prints."""

    def on_output_drained(self) -> None:
        """Called when no rank can print any more."""


class Streams:
    """The output pipes of all ranks of an attempt, and of programs alongside them, which outlive it."""

    def __init__(
        self,
        loop: EventLoop,
        screen: Screen,
        listener: OutputHandler,
        *,
        full_tracebacks: bool = True,
    ) -> None:
        """``full_tracebacks``: tracebacks of secondary failures are not shortened."""
        self._loop, self._screen, self._full_tracebacks = loop, screen, full_tracebacks
        self._listener = listener
        self._streams: dict[int, _OpenStream] = {}
        self._files: dict[Source, int] = {}
        self._tails: dict[Source, TailBuffer] = {}
        self._attempt_starts: dict[Source, int] = {}  # bytes that each rank had printed before this attempt
        self._programs_printed: dict[str, float] = {}  # when each program printed last, or was started (monotonic)
        self._times: dict[int, OutputTimes] = {}
        self._shown: set[int] = set()  # ranks whose stderr is shown
        self._closed: dict[int, _OpenStream] = {}  # of ranks that have closed their stderr, for ``add_stderr``
        self._subscribers: tuple[Callable[[Source, bytes], None], ...] = ()
        self._paused = False
        screen.set_drain_callback(self._resume)

    @property
    def has_open_rank(self) -> bool:
        """Whether any rank may still print."""
        return any(isinstance(stream.source, int) for stream in self._streams.values())

    def open_rank(
        self, fds: dict[str, int], rank: int, *, has_stdin: bool, show: frozenset[int], log: str | None
    ) -> None:
        """Add to ``fds`` the rank's stdin, stdout and stderr; those not added are inherited from the launcher.

        ``has_stdin``: the rank gets the launcher's stdin. ``show``: which of descriptors 1 and 2 are shown. ``log``: a
        file for both.
        Raises OSError if too many files are open.
        """
        self._attempt_starts[rank] = self._tails[rank].total if rank in self._tails else 0
        self._closed.pop(rank, None)
        (self._shown.add if 2 in show else self._shown.discard)(rank)
        times = self._times.setdefault(rank, OutputTimes())
        self._open_log_file(rank, log)
        self._try_times_write(
            rank, lambda: times.begin(self._attempt_starts[rank], log if rank in self._files else None)
        )
        if not has_stdin:
            fds["stdin"] = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if not (has_stdin and len(show) == 2 and log is None):
            on_output = partial(self._listener.on_output, rank)
            fds["stdout"] = self._open_pipe(rank, 1, show=1 in show, on_output=on_output)
            fds["stderr"] = self._open_pipe(rank, 2, show=2 in show, on_output=on_output)

    def open_program(self, fds: dict[str, int], name: str, *, show: bool, log: str | None, on_output: Callback) -> None:
        """Add to ``fds`` a program's stdin, stdout and stderr; ``on_output`` is called whenever ``tail`` has more."""
        self._attempt_starts[name] = self._tails[name].total if name in self._tails else 0
        self._programs_printed[name] = time.monotonic()
        self._open_log_file(name, log)
        fds["stdin"] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        fds["stdout"] = self._open_pipe(name, 2, show=show, on_output=on_output)
        fds["stderr"] = os.dup(fds["stdout"])

    def _open_pipe(self, source: Source, number: int, *, show: bool, on_output: Callback = lambda: None) -> int:
        read, write = os.pipe()
        try:
            fcntl.fcntl(read, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
        except OSError:
            pass  # above the user's limit (pipe-user-pages-soft), or not Linux
        os.set_blocking(read, False)
        stream = self._streams[read] = _OpenStream(source, number, read, show, on_output)
        if isinstance(source, int) and number == 2 and not self._full_tracebacks:
            stream.tracebacks = TracebackFilter()
        self._loop.watch_fd(read, partial(self._read, stream))
        if show:
            self._screen.show_lines(source, number, b"")
        return write

    def _open_log_file(self, source: Source, path: str | None) -> None:
        """Write all output from now on to the file at ``path``, byte for byte."""
        if path is None:
            return
        try:
            file = open_for_writing(path, os.O_APPEND)
        except OSError as error:
            return self._screen.show_note(f"{_describe_source(source)} has no log file: {error.strerror}")
        if before := self._files.pop(source, None):
            os.close(before)
        self._files[source] = file

    def prepare_restart(self, rank: int, written: int) -> bool:
        """Return whether all that a rank has written came by its pipes; if so, show what it prints again only once."""
        streams = self._streams_of(rank)
        for stream in streams:
            while self._read(stream):
                pass
        if written > sum(stream.received for stream in streams):
            return False
        for stream in streams:
            stream.repeated, stream.repeated_more = bytes(stream.first), stream.received - len(stream.first)
        return True

    def tail(self, source: Source, limit: int = MEMORY_TAIL_BYTES) -> bytes:
        """Return the last output of a rank or program since its last start, at most ``limit`` bytes."""
        tail = self._tails.get(source)
        return tail.last(min(limit, tail.total - self._attempt_starts.get(source, 0))) if tail else b""

    def since(self, rank: int, moment: float) -> bytes:
        """The output of a rank since this time, in any attempt, as far as it is in memory."""
        tail, start = self._tails.get(rank), self._times[rank].since(moment) if rank in self._times else None
        return b"" if tail is None or start is None else tail.last(tail.total - start)

    def times(self, rank: int, count: int) -> bytes:
        """The times of the last ``count`` bytes of a rank, in the format of the ``.times`` file."""
        return self._times[rank].format_after(self._tails[rank].total - count) if rank in self._tails else b""

    def quiet_s(self, program: str) -> float | None:
        """For how long a program has printed nothing; None if it was never started."""
        printed = self._programs_printed.get(program)
        return None if printed is None else time.monotonic() - printed

    def ranks_in_memory(self) -> list[int]:
        """The ranks whose output is in memory, in order."""
        return sorted(source for source in self._tails if isinstance(source, int))

    def subscribe(self, on_data: Callable[[Source, bytes], None]) -> None:
        """From now on call ``on_data(source, data)`` with each piece of output of a rank or program."""
        self._subscribers += (on_data,)

    def unsubscribe(self, on_data: Callable[[Source, bytes], None]) -> None:
        """Remove a subscriber."""
        self._subscribers = tuple(each for each in self._subscribers if each != on_data)

    def set_shown(self, name: str, show: bool) -> None:
        """Show the output of this program from now on, or stop showing it."""
        for stream in self._streams_of(name):
            stream.show = show
            self._screen.show_lines(name, stream.number, b"", stream.lines.progress_bar if show else b"")

    def read_pending(self, source: Source) -> None:
        """Read the remaining output of this rank or program, which has ended."""
        for stream in self._streams_of(source):
            while self._read(stream):
                pass

    def flush(self, mark: bytes) -> None:
        """Show all output of the ranks so far, unfinished lines too, then write ``mark`` to stdout and stderr."""
        for stream in [each for each in self._streams.values() if isinstance(each.source, int)]:
            self._read(stream)  # once, as in ``close_source``
            if stream.show and stream.fd in self._streams:
                lines = self._filter_tracebacks(stream, stream.lines.close())
                lines += stream.tracebacks.release() if stream.tracebacks else b""
                self._screen.show_lines(stream.source, stream.number, lines)
        self._screen.write_marker(mark)

    def close(self) -> None:
        """Show the remaining output, and close all ranks' streams; their tails are kept until the next attempt."""
        for source in {*self._files, *(stream.source for stream in self._streams.values())}:
            if isinstance(source, int):
                self.close_source(source)

    def close_source(self, source: Source) -> None:
        """Read and show the remaining output of a rank or program, and close its streams."""
        for stream in self._streams_of(source):
            self._read(stream)  # not read so far while the screen is full; a read returns all that a pipe holds
            if stream.fd in self._streams:
                self._on_eof(stream)
        if source in self._files:
            os.close(self._files.pop(source))
        if isinstance(source, int) and source in self._times:
            self._times[source].close()

    def _streams_of(self, source: Source) -> list[_OpenStream]:
        return [stream for stream in self._streams.values() if stream.source == source]

    def _read(self, stream: _OpenStream) -> bool:
        """Read a stream once; return whether there was data."""
        try:
            data = os.read(stream.fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._on_eof(stream)
            if not self.has_open_rank:
                self._loop.call_soon(self._listener.on_output_drained)
            return False
        if data := stream.drop_repeated(data):
            self._handle_output(stream, data)
        return True

    def add_stderr(self, rank: int, data: bytes) -> None:
        """Add data from another source to a rank's stderr, even if the rank has closed it."""
        stream = next((each for each in self._streams_of(rank) if each.number == 2), None)
        self._handle_output(
            stream or self._closed.setdefault(rank, _OpenStream(rank, 2, -1, rank in self._shown)), data
        )

    def _handle_output(self, stream: _OpenStream, data: bytes) -> None:
        """Write a piece of output to the log file, keep it in memory and show it."""
        self._write_log(stream.source, data)
        if (tail := self._tails.get(stream.source)) is None:
            tail = self._tails[stream.source] = TailBuffer(
                REPORTED if stream.source in self._files else MEMORY_TAIL_BYTES
            )
        if isinstance(stream.source, int):
            self._mark(stream.source, tail)
        else:
            self._programs_printed[stream.source] = time.monotonic()
        tail.add(data)
        for on_data in self._subscribers:
            on_data(stream.source, data)
        if stream.show:
            lines = self._filter_tracebacks(stream, stream.lines.feed(data))
            self._screen.show_lines(stream.source, stream.number, lines, stream.lines.progress_bar)
            if self._screen.is_full and not self._paused:
                self._paused = True
                for other in self._streams.values():
                    self._loop.unwatch_fd(other.fd)
        stream.on_output()

    def _filter_tracebacks(self, stream: _OpenStream, lines: bytes) -> bytes:
        """Return the lines to show now: a traceback is held until the rank ends or goes on."""
        tracebacks = stream.tracebacks
        if tracebacks is None:
            return lines
        was_holding = tracebacks.is_holding
        lines = tracebacks.feed(lines)
        if tracebacks.is_holding and not was_holding:
            self._loop.call_later(
                EXIT_TIMEOUT_S,
                lambda: self._screen.show_lines(stream.source, 2, tracebacks.release(), stream.lines.progress_bar),
            )
        return lines

    def _resume(self) -> None:
        if self._paused and not self._screen.is_full:
            self._paused = False
            for stream in self._streams.values():
                self._loop.watch_fd(stream.fd, partial(self._read, stream))

    def _write_log(self, source: Source, data: bytes) -> None:
        if (file := self._files.get(source)) is None:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            os.close(self._files.pop(source))
            self._screen.show_note(f"the log of {_describe_source(source)} ends here: {error.strerror}")

    def _mark(self, rank: int, tail: TailBuffer) -> None:
        """Record the time of the data that a rank prints next, if a mark is due."""
        now, times = time.time(), self._times[rank]
        if times.is_mark_due(now):
            mark = Mark(tail.line_start_offset, now)
            self._try_times_write(rank, lambda: times.add(mark, tail.total - tail.limit))

    def _try_times_write(self, rank: int, write: Callback) -> None:
        try:
            write()
        except OSError as error:
            self._times[rank].close()
            self._screen.show_note(f"`logs --since` will not work for rank {rank}: {error.strerror}")

    def _on_eof(self, stream: _OpenStream) -> None:
        if stream.show:
            lines = self._filter_tracebacks(stream, stream.lines.close())
            rest = stream.tracebacks.close() if stream.tracebacks else b""
            if b"\n" in rest[:-1]:  # a traceback: the failure report may contain it, too
                self._screen.hold_traceback(stream.source, rest)
                rest = b""
            self._screen.show_lines(stream.source, stream.number, lines + rest, last=True)
        self._loop.unwatch_fd(stream.fd)
        os.close(stream.fd)
        del self._streams[stream.fd]


def _describe_source(source: Source) -> str:
    return f"rank {source}" if isinstance(source, int) else source
