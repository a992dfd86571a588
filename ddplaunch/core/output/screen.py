"""The screen of a run: shows the ranks' output and ddplaunch's own messages on stdout and stderr.

Terminals, colours, widths, and whether this node reports what concerns the job, are known here only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from ddplaunch.base.event_loop import Callback, EventLoop
from ddplaunch.base.text import format_count
from ddplaunch.base.tty import is_interactive, window_size
from ddplaunch.core.events import AttemptPlanned, Event, JobEnded, JobStalled, NoteAdded, Restarting
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.node_config import ScreenOptions
from ddplaunch.core.output.line_merger import HOLD_S, LineMerger
from ddplaunch.core.output.log_message import FORMATTER, LogMessage, MessageKind
from ddplaunch.core.output.sink import HIGH_WATER_BYTES, Sink
from ddplaunch.core.output.wait_footer import WaitFooter
from ddplaunch.core.prefix import add_prefix, format_for_ranks, make_prefixes

Source = int | str
"""The origin of output: a rank, or the name of a program alongside the ranks."""

_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")  # ANSI codes, by rank; red is for errors
_FAINT = "2"  # for programs alongside the ranks
_BOLD = "1"  # for merged lines
_CLEAR = b"\r\x1b[K"


_TRACEBACK = "Traceback (most recent call last)"
TRACEBACK_S = 2.0  # a traceback is held for the failure report; if other ranks stop later than this, it is shown


def make_screen(loop: EventLoop, options: ScreenOptions) -> Screen:
    """Make the screen for the launcher's stdout and stderr: a ``TerminalScreen`` if one is a terminal."""
    return (TerminalScreen if is_interactive(1) or is_interactive(2) else Screen)(loop, options)


class Screen:
    """Writes complete lines with their rank's prefix, to files, pipes and logs; as an observer it shows notes."""

    reads_keys = False
    """Whether it reads the keys of the terminal, so that no rank gets them without ``--stdin``."""

    def __init__(self, loop: EventLoop, options: ScreenOptions) -> None:
        self._loop = loop
        self.reports_job = True  # whether it shows what concerns the job: only on node 0 if all print into one log
        self._stdout = Sink(loop, 1, options.output_timeout_s)
        self._stderr = self._stdout if _same_file(1, 2) else Sink(loop, 2, options.output_timeout_s)
        self.terminal = self._stdout.is_terminal
        self._template = options.prefix
        self._prefixes: dict[int, str] = {}
        self._width = 0
        self._merged = {n for n in (1, 2) if (self._sink(n).is_terminal if options.merge is None else options.merge)}
        self._merger = LineMerger()
        self._flush_scheduled = False
        self._tracebacks: dict[Source, bytes] = {}  # held for the failure report
        shows_seconds = self._stderr.is_terminal and not FORMATTER.as_json
        self._footer = WaitFooter(loop, self, options.quiet_s, shows_seconds=shows_seconds)

    @property
    def is_full(self) -> bool:
        """Whether so much output waits for the reader of stdout or stderr that the ranks should wait too."""
        return self._stdout.is_full or self._stderr.is_full

    @property
    def is_drained(self) -> bool:
        """Whether all output is written."""
        return self._stdout.is_drained and self._stderr.is_drained

    @property
    def is_stderr_drained(self) -> bool:
        """Whether stderr has no unwritten output, so that a line appears at once."""
        return self._stderr.is_drained

    @property
    def lost_lines_note(self) -> str:
        """A message about lines that could not be written to a file on stdout; "" if none are missing."""
        lost = format_count(self._stdout.lost_line_count, "line") if self._stdout.lost_line_count else ""
        return f"stdout could not be written: {lost} lost ({self._stdout.error})" if lost else ""

    def end(self) -> None:
        """Called when the job has ended: from now on, output that cannot be written is dropped after a timeout."""
        for sink in {self._stdout, self._stderr}:
            sink.end()

    def set_drain_callback(self, callback: Callback) -> None:
        """Set the callback that is called when there may be room for output again."""
        self._stdout.on_drained = self._stderr.on_drained = callback

    def show_lines(self, source: Source, fd: int, lines: bytes, bar: bytes = b"", *, last: bool = False) -> None:
        """Show complete lines from descriptor ``fd`` (1 or 2), and the progress bar that is drawn there.

        Call it, possibly without lines, before the source prints there; ``last``: the source's stream has ended.
        All lines are prefixed by a single replace: no Python code runs per line, except for merging.
        """
        sink = self._sink(fd)
        if fd == 2 and b"[rank" in lines and self._prefix_text(source):
            lines = self._strip_torch_prefix(source, lines)
        if isinstance(source, str) or fd not in self._merged:
            return self._write(sink, add_prefix(self._prefix_bytes(source, sink), lines) if lines else b"")
        self._merger.add(source, fd, lines, time.monotonic())
        if bar:
            self._merger.flush_rank(source)
        if last:
            self._merger.close_stream(source, fd)
        self._show_merged()
        self._write(sink, b"")  # the bar

    def hold_traceback(self, source: Source, text: bytes) -> None:
        """Hold the last traceback of ``source``, and show it after a while unless the failure report contains it."""
        self._tracebacks[source] = text
        self._loop.call_later(TRACEBACK_S, self._show_tracebacks)

    def _show_tracebacks(self, verdict: FailureReport | None = None) -> None:
        """Show the held tracebacks, except those in the failure report."""
        held, self._tracebacks = self._tracebacks, {}
        first = verdict.first if verdict and self.reports_job else None
        reported = {first.rank, *verdict.alike} if verdict and first else set()
        count = (first.traceback or "").count(_TRACEBACK) if first else 0
        for source, text in held.items():
            if source not in reported or text.count(_TRACEBACK.encode()) != count:
                self.show_lines(source, 2, text)
                self._show_merged(math.inf)

    def _show_merged(self, until: float = 0.0) -> None:
        """Show the lines that need not be held any longer, and those that arrived before ``until``."""
        self._merger.flush_until(until)
        shown: dict[Sink, bytearray] = {}
        for ranks, fd, lines in self._merger.take_output():
            sink = self._sink(fd)
            prefix = self._prefix_bytes(ranks[0] if len(ranks) == 1 else ranks, sink)
            shown.setdefault(sink, bytearray()).extend(add_prefix(prefix, lines))
        for sink, text in shown.items():
            self._write(sink, bytes(text))
        if not self._flush_scheduled and (due := self._merger.next_flush_time) is not None:
            self._flush_scheduled = True
            self._loop.call_later(max(0.0, due - time.monotonic()), self._on_flush_timer)

    def _on_flush_timer(self) -> None:
        self._flush_scheduled = False
        self._show_merged(time.monotonic() - HOLD_S)

    def _strip_torch_prefix(self, source: Source, lines: bytes) -> bytes:
        """Remove torch.distributed's "[rank0]: " from tracebacks if ddplaunch's prefix has the rank, too."""
        torch_prefix = f"[rank{source}]: ".encode()
        if str(source) not in self._prefix_text(source):
            return lines
        return lines.removeprefix(torch_prefix).replace(b"\n" + torch_prefix, b"\n")

    def write_marker(self, line: bytes) -> None:
        """Write this line to stdout and to stderr, after all earlier output."""
        self._show_merged(math.inf)
        for sink in {self._stdout, self._stderr}:
            self._write(sink, line)

    def show_note(self, text: str, *, of_job: bool = False) -> None:
        """Show a note of ddplaunch between the ranks' lines; ``of_job``: it concerns more than this node."""
        self.show_message(LogMessage(MessageKind.NOTE, text), of_job=of_job)

    def show_message(self, message: LogMessage, *, of_job: bool = False) -> None:
        """Show a message of any kind; ``of_job``: it concerns more than this node."""
        if self.reports_job or not of_job:
            self._show_merged(math.inf)
            self._write(self._stderr, FORMATTER.format(message).encode(errors="replace"))

    def show_footer(self, text: str, *, of_job: bool = False, waited: float = 0.0) -> None:
        """Show what is awaited and for how long (``waited`` seconds so far), until the ranks start or the job ends."""
        self._footer.set_text(text if self.reports_job or not of_job else "", waited)

    def suspend(self, stop: Callback) -> None:
        """Call ``stop``, which suspends the launcher (Ctrl-Z) and returns when it is resumed."""
        self._show_merged(math.inf)
        stop()

    def observe(self, event: Event) -> None:
        match event:
            case NoteAdded(text=text) | JobStalled(text=text) if text:
                self.show_note(text, of_job=True)
            case Restarting(attempt, wait, text, verdict):
                self._show_tracebacks()
                fields = {"attempt": attempt, "wait": wait, "failure": verdict}
                self.show_message(LogMessage(MessageKind.RESTART, text, fields), of_job=True)
            case AttemptPlanned(plan=plan):
                FORMATTER.set_origin(plan)
                self._prefixes, self._width = make_prefixes(self._template, plan)
                self.show_footer("")
            case JobEnded(verdict=verdict):
                self._show_tracebacks(verdict)
                self.show_footer("")

    def _sink(self, fd: int) -> Sink:
        return self._stdout if fd == 1 else self._stderr

    def write_footer(self, text: str) -> None:
        self.show_message(LogMessage(MessageKind.WAITING, text))

    def _write(self, sink: Sink, lines: bytes) -> None:
        sink.write(lines)

    def _prefix_text(self, source: Source | Sequence[int]) -> str:
        if isinstance(source, str):
            return f"[{source}]".ljust(self._width)
        if isinstance(source, int):
            return self._prefixes.get(source, "").ljust(self._width)
        marker, widest = format_for_ranks(self._template, source), format_for_ranks(self._template, [*self._prefixes])
        self._width = max(self._width, min(len(marker), len(widest)))  # later lines are aligned with these
        return marker.ljust(self._width)

    def _prefix_bytes(self, source: Source | Sequence[int], sink: Sink) -> bytes:
        marker = self._prefix_text(source)
        return f"{marker} ".encode(errors="replace") if marker else b""


class TerminalScreen(Screen):
    """A screen on a terminal: the bottom row is the progress bar of the lowest rank that draws one, or the footer."""

    def __init__(self, loop: EventLoop, options: ScreenOptions) -> None:
        super().__init__(loop, options)
        self._home = self._stderr if self._stderr.is_terminal else self._stdout
        self._colour = options.colour
        self._bars: dict[tuple[bool, Source, int], bytes] = {}
        self._footer_row = b""
        self._drawn = False  # a bottom row
        self._input_row = b""  # of the user's input, with the cursor in its place
        self._held: bytearray | None = None  # output while another program has the terminal

    @property
    def is_full(self) -> bool:
        return super().is_full or len(self._held or b"") > HIGH_WATER_BYTES

    def hold_output(self, on: bool) -> None:
        """Hold all output while another program draws on the terminal; ``on=False`` shows it."""
        held, self._held = self._held, bytearray() if on else None
        if held:
            self._write(self._home, bytes(held))
            self._stdout.on_drained()

    def write_raw(self, data: bytes) -> None:
        """Write the output of the program that draws on the terminal."""
        self._home.write(data)

    def show_input_row(self, row: bytes) -> None:
        """Show the user's input as the bottom row; b"" removes it."""
        self._input_row = row
        self._write(self._home, b"")

    def print_text(self, text: str) -> None:
        """Print text that the user has requested."""
        self._show_merged(math.inf)
        self._write(self._home, text.encode(errors="replace"))

    def show_lines(self, source: Source, fd: int, lines: bytes, bar: bytes = b"", *, last: bool = False) -> None:
        key = (isinstance(source, str), source, fd)
        if bar:
            self._bars[key] = bar
        else:
            self._bars.pop(key, None)
        super().show_lines(source, fd, lines, bar, last=last)

    def write_footer(self, text: str) -> None:
        if not self._stderr.is_terminal or FORMATTER.as_json:
            return super().write_footer(text)
        self._footer_row = f"ddplaunch: {text}".encode(errors="replace") if text else b""
        self._write(self._stderr, b"")

    def _write(self, sink: Sink, lines: bytes) -> None:
        if not sink.is_terminal:
            return sink.write(lines)
        if self._held is not None:
            self._held += lines
            return
        bottom = self._bottom_row(sink)
        if lines or bottom or self._drawn:
            sink.write((_CLEAR if self._drawn else b"") + lines + bottom)
        self._drawn = bool(bottom)

    def _bottom_row(self, sink: Sink) -> bytes:
        """The bottom row: the user's input, the progress bar of the lowest rank, or the footer."""
        if self._input_row:
            return self._input_row if sink is self._home else b""
        here = [key for key in self._bars if self._sink(key[2]) is sink]
        if not here:
            return _truncate_row(self._footer_row, 0) if sink is self._stderr else b""
        _, source, _ = lowest = min(here)
        return self._prefix_bytes(source, sink) + _truncate_row(self._bars[lowest], len(self._prefix_text(source)) + 1)

    def _prefix_bytes(self, source: Source | Sequence[int], sink: Sink) -> bytes:
        if not (self._colour and sink.is_terminal and self._prefix_text(source)):
            return super()._prefix_bytes(source, sink)
        style = _FAINT if isinstance(source, str) else _BOLD
        colour = _COLOURS[source % len(_COLOURS)] if isinstance(source, int) else style
        return f"\x1b[{colour}m{self._prefix_text(source)}\x1b[0m ".encode()


def _truncate_row(row: bytes, used: int) -> bytes:
    """Cut a row to the terminal's width: a wrapped row cannot be redrawn."""
    columns, _ = window_size(1 if os.isatty(1) else 2)
    return row.decode(errors="replace")[: max(1, columns - used - 1)].encode()


def _same_file(one: int, two: int) -> bool:
    try:
        return os.path.sameopenfile(one, two)
    except OSError:
        return False
