"""What the ranks print, on its way: prefixed whole lines to the console, raw bytes to each rank's file, and a tail.

One pipe a stream; the prefixes go in with one replace a read, so no Python runs per line.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ddplaunch.files import create
from ddplaunch.loop import Loop
from ddplaunch.output.lines import Lines
from ddplaunch.output.sink import PATIENCE, Sink

PIPE_SIZE = 1 << 18
"""Bytes a rank may be ahead of us before it waits (F_SETPIPE_SZ; the kernel's default is 64 KiB)."""

TAIL = 8192
"""Bytes of each rank's last output that are kept for the failure report."""

DRAIN_PATIENCE = 1.0
"""Seconds to wait for output after everything is dead; longer only if a process that cannot die holds a pipe."""

_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")
"""ANSI colours of the prefixes, by rank; red is left to errors."""

_FAINT = "2"
"""That of a sidecar's."""

_CLEAR = b"\r\x1b[K"


Source = int | str
"""Whose output it is: a rank's number, or the name of a sidecar."""


@dataclass
class _Stream:
    source: Source
    fd: int
    sink: Sink | None  # None where it is not shown
    prefix: bytes
    heard: Callable[[], None] = lambda: None
    lines: Lines = field(default_factory=Lines)


class Output:
    """The pipes of all ranks of an attempt, and those of the sidecars, which outlive it."""

    def __init__(self, loop: Loop, *, colour: bool, patience: float = PATIENCE) -> None:
        """``patience``: seconds after which a reader of ours that takes nothing loses what it misses."""
        self._loop = loop
        self._colour = colour
        self._width = 1
        self._streams: dict[int, _Stream] = {}
        self._files: dict[Source, int] = {}
        self._tails: dict[Source, bytes] = {}
        self._paused = False
        self._bar_shown = False
        self._status = b""
        self.drained: Callable[[], None] = lambda: None
        self.stdout = Sink(loop, 1, patience)
        same = _same_file(1, 2)
        self.stderr = self.stdout if same else Sink(loop, 2, patience)
        self.stdout.relieved = self.stderr.relieved = self._resume

    @property
    def open(self) -> bool:
        """Whether some rank may still print."""
        return any(isinstance(stream.source, int) for stream in self._streams.values())

    @property
    def written(self) -> bool:
        return self.stdout.idle and self.stderr.idle

    def streams(self, rank: int, *, reads: bool, shown: frozenset[int], log: str | None) -> dict[str, int]:
        """Make what ``rank`` has for stdin, stdout and stderr; what is missing it inherits from us.

        Args:
            reads: whether it has our stdin. shown: which of its descriptors 1 and 2 are. log: a file for all of it.

        Raises:
            OSError: too many files are open.
        """
        if log is not None:
            try:
                self.keep(rank, log)
            except OSError as error:
                self.note(f"no log of rank {rank}: {error.strerror}")
        fds = {} if reads else {"stdin": os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)}
        if not (reads and len(shown) == 2 and log is None):
            try:
                fds["stdout"] = self.pipe(rank, 1, shown=1 in shown)
                fds["stderr"] = self.pipe(rank, 2, shown=2 in shown)
            except OSError:
                for fd in fds.values():
                    os.close(fd)
                raise
        return fds

    def pipe(self, rank: int, number: int, *, shown: bool) -> int:
        """Make the pipe for descriptor ``number`` (1 or 2) of ``rank``; return the end that the rank writes to."""
        return self._pipe(rank, (self.stdout if number == 1 else self.stderr) if shown else None)

    def sidecar(self, name: str, *, shown: bool, log: str | None, heard: Callable[[], None]) -> int:
        """Make the pipe for all that a sidecar prints, shown on stderr; return the end that it writes to.

        Args:
            heard: called whenever it has printed something, which ``tail`` has then.
        """
        if log is not None:
            try:
                self.keep(name, log)
            except OSError as error:
                self.note(f"no log of {name}: {error.strerror}")
        return self._pipe(name, self.stderr if shown else None, heard)

    def _pipe(self, source: Source, sink: Sink | None, heard: Callable[[], None] = lambda: None) -> int:
        read, write = os.pipe()
        try:
            fcntl.fcntl(read, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_SIZE)
        except OSError:
            pass  # over the user's limit (pipe-user-pages-soft), or not Linux
        os.set_blocking(read, False)
        stream = _Stream(source, read, sink, self._prefix(source, sink), heard)
        self._streams[read] = stream
        self._loop.watch(read, partial(self._read, stream))
        return write

    def keep(self, source: Source, path: str) -> None:
        """Write all that a rank or sidecar prints from now on to the file at ``path``, byte for byte.

        Raises:
            OSError: it cannot be opened.
        """
        file = create(path, os.O_APPEND)
        if before := self._files.pop(source, None):
            os.close(before)
        self._files[source] = file

    def tail(self, source: Source) -> bytes:
        """The last bytes that a rank or sidecar printed."""
        return self._tails.get(source, b"")

    def say(self, text: str) -> None:
        """Print lines of the launcher's own on stderr, between whole lines of the ranks."""
        self._show(self.stderr, text.encode(errors="replace"))

    def note(self, text: str) -> None:
        """Tell people something; each line begins with our name."""
        self.say("".join(f"ddplaunch: {line}\n" for line in text.splitlines()))

    def status(self, text: str) -> None:
        """Show a line of the launcher's own below all others on a terminal, instead of the last; "" is none."""
        self._status = text.encode(errors="replace")
        self._show(self.stderr, b"")

    def number(self, world_size: int) -> None:
        """Make room in the prefixes for the ranks of a job of this size."""
        self._width = len(str(world_size - 1))

    def show(self, name: str, shown: bool) -> None:
        """Show what this sidecar prints from now on, or no longer."""
        for stream in self._of(name):
            stream.sink = self.stderr if shown else None
            stream.prefix = self._prefix(name, stream.sink)

    def catch_up(self, name: str) -> None:
        """Read what this sidecar, which has ended, had printed."""
        for stream in self._of(name):
            while self._took(stream):
                pass

    def close(self) -> None:
        """Give out what is left of every rank's stream and forget them."""
        for source in {*self._files, *self._tails, *(stream.source for stream in self._streams.values())}:
            if isinstance(source, int):
                self.forget(source)

    def forget(self, source: Source) -> None:
        """Give out what is left of a rank's or sidecar's streams."""
        for stream in self._of(source):
            self._end(stream)
        if source in self._files:
            os.close(self._files.pop(source))
        self._tails.pop(source, None)

    def _of(self, source: Source) -> list[_Stream]:
        return [stream for stream in self._streams.values() if stream.source == source]

    def _prefix(self, source: Source, sink: Sink | None) -> bytes:
        text = f"[{source}]".ljust(self._width + 2)
        if self._colour and sink is not None and sink.terminal:
            colour = _COLOURS[source % len(_COLOURS)] if isinstance(source, int) else _FAINT
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return text.encode() + b" "

    def _read(self, stream: _Stream) -> None:
        self._took(stream)

    def _took(self, stream: _Stream) -> bool:
        """Read once; return whether there was something."""
        try:
            data = os.read(stream.fd, PIPE_SIZE)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            if not self.open:
                self.drained()
            return False
        file = self._files.get(stream.source)
        if file is not None:
            self._store(stream.source, file, data)
        self._tails[stream.source] = (self._tails.get(stream.source, b"") + data[-TAIL:])[-TAIL:]
        if stream.sink is not None:
            self._show(stream.sink, self._prefixed(stream, stream.lines.feed(data)))
            if stream.sink.full and not self._paused:
                self._paused = True
                for other in self._streams.values():
                    self._loop.forget(other.fd)
        stream.heard()
        return True

    def _resume(self) -> None:
        if not self._paused or self.stdout.full or self.stderr.full:
            return
        self._paused = False
        for stream in self._streams.values():
            self._loop.watch(stream.fd, partial(self._read, stream))

    def _store(self, source: Source, file: int, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            os.close(self._files.pop(source))
            whose = f"rank {source}" if isinstance(source, int) else source
            self.note(f"the log of {whose} ends here: {error.strerror}")

    def _end(self, stream: _Stream) -> None:
        if stream.sink is not None:
            self._show(stream.sink, self._prefixed(stream, stream.lines.close()))
        self._loop.forget(stream.fd)
        os.close(stream.fd)
        del self._streams[stream.fd]

    def _prefixed(self, stream: _Stream, lines: bytes) -> bytes:
        if not lines:
            return b""
        return stream.prefix + lines[:-1].replace(b"\n", b"\n" + stream.prefix) + b"\n"

    def _show(self, sink: Sink, lines: bytes) -> None:
        """Write lines; in a terminal the progress bar of the lowest rank that draws one stays below them."""
        if not sink.terminal:
            sink.write(lines)
            return
        bars = [each for each in self._streams.values() if each.sink is sink and each.lines.bar]
        drawn = min(bars, key=_ranks_first, default=None)
        bar = b"" if drawn is None else drawn.prefix + _fit(drawn.lines.bar, len(self._bare(drawn)), sink)
        if not bar and self._status and sink is self.stderr:
            bar = _fit(self._status, 0, sink)
        if lines or bar or self._bar_shown:
            sink.write((_CLEAR if self._bar_shown else b"") + lines + bar)
        self._bar_shown = bool(bar)

    def _bare(self, stream: _Stream) -> str:
        return f"[{stream.source}]".ljust(self._width + 2) + " "


def _ranks_first(stream: _Stream) -> tuple[bool, int, str]:
    return (False, stream.source, "") if isinstance(stream.source, int) else (True, 0, stream.source)


def _fit(bar: bytes, used: int, sink: Sink) -> bytes:
    """Cut a bar to the terminal's width: a row that wraps cannot be drawn over."""
    try:
        columns = os.get_terminal_size(1 if os.isatty(1) else 2).columns or 80
    except OSError:
        columns = 80
    return bar.decode(errors="replace")[: max(1, columns - used - 1)].encode()


def _same_file(one: int, two: int) -> bool:
    try:
        return os.path.sameopenfile(one, two)
    except OSError:
        return False
