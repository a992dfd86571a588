"""Where people read what ranks print, and what we say ourselves: one ``Screen`` draws all of it.

It alone knows of terminals, colours and widths, and whether this node speaks where many print into one log.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from ddplaunch.control.failure import FailureReport
from ddplaunch.dataclass import dataclass
from ddplaunch.loop import Callback, EventLoop
from ddplaunch.output.equal_lines import HOLD_S, LineMerger
from ddplaunch.output.events import AttemptPlanned, Event, JobEnded, JobStalled, NoteAdded, Restarting
from ddplaunch.output.prefix import add_prefix, format_for_ranks, make_prefixes
from ddplaunch.output.sink import HIGH_WATER_BYTES, Sink
from ddplaunch.output.terminal import is_interactive, window_size
from ddplaunch.output.voice import FORMATTER, LogMessage, MessageKind
from ddplaunch.output.waiting import WaitFooter
from ddplaunch.words import format_count

Source = int | str
"""Whose output it is: a rank's number, or the name of a sidecar."""

_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")  # ANSI's, by rank; red is left to errors
_FAINT = "2"  # of a sidecar
_BOLD = "1"  # of several ranks
_CLEAR = b"\r\x1b[K"


_TRACEBACK = "Traceback (most recent call last)"
TRACEBACK_S = 2.0  # seconds for the report to come; if others take longer to stop, the rank's own traceback is shown


@dataclass(frozen=True)
class ScreenOptions:
    """How a screen shows what ranks print: as in the policy."""

    output_timeout_s: float
    quiet_s: float
    prefix: str
    merge: bool | None


def make_screen(loop: EventLoop, how: ScreenOptions, *, speaks: bool, colour: bool) -> Screen:
    """Make the screen for where our stdout and stderr lead."""
    if is_interactive(1) or is_interactive(2):
        return TerminalScreen(loop, how, speaks=speaks, colour=colour)
    return Screen(loop, how, reports_job=speaks)


class Screen:
    """Shows things to people: whole lines, each with its rank before it, for files, pipes and logs.

    It is an observer, too, of the notes in the events.
    """

    def __init__(self, loop: EventLoop, options: ScreenOptions, *, reports_job: bool) -> None:
        """``reports_job``: it says what concerns the job; where all nodes print into one log, node 0 alone does."""
        self._loop, self.speaks = loop, reports_job
        self._stdout = Sink(loop, 1, options.output_timeout_s)
        self._stderr = self._stdout if _same_file(1, 2) else Sink(loop, 2, options.output_timeout_s)
        self.terminal = self._stdout.is_terminal
        self._template = options.prefix
        self._prefixes: dict[int, str] = {}
        self._width = 0
        self._merges = {n for n in (1, 2) if (self._sink(n).is_terminal if options.merge is None else options.merge)}
        self._equal = LineMerger()
        self._ticks = False
        self._tracebacks: dict[Source, bytes] = {}  # the last that these printed
        counts = self._stderr.is_terminal and not FORMATTER.as_json
        self._waiting = WaitFooter(loop, self._write_footer, options.quiet_s, shows_seconds=counts)

    @property
    def is_full(self) -> bool:
        """Whether people are so far behind that the ranks should wait."""
        return self._stdout.is_full or self._stderr.is_full

    @property
    def is_drained(self) -> bool:
        """Whether all that was shown is written."""
        return self._stdout.is_drained and self._stderr.is_drained

    @property
    def lost(self) -> str:
        """How much of the output on stdout a file has not taken, for people; "" where it has all."""
        lost = format_count(self._stdout.lost, "line") if self._stdout.lost else ""
        return f"stdout could not be written: {lost} lost ({self._stdout.error})" if lost else ""

    def end(self) -> None:
        """The job has ended: from now on wait for a bounded time for what is not written yet."""
        for sink in {self._stdout, self._stderr}:
            sink.end()

    def set_drain_callback(self, callback: Callback) -> None:
        """Call it whenever there may be room again."""
        self._stdout.on_drained = self._stderr.on_drained = callback

    def show_lines(self, source: Source, number: int, lines: bytes, bar: bytes = b"", *, last: bool = False) -> None:
        """Show whole lines that came from descriptor ``number`` (1 or 2), and the progress bar that is drawn there.

        The first call, with lines or without, is made before the source prints there; ``last``: it prints no more.
        It is one replace for however many lines: no Python runs per line but where equal ones are sought.
        """
        sink = self._sink(number)
        if number == 2 and b"[rank" in lines and self._prefix_text(source):
            lines = self._strip_torch_prefix(source, lines)
        if isinstance(source, str) or number not in self._merges:
            return self._write(sink, add_prefix(self._prefix_bytes(source, sink), lines) if lines else b"")
        self._equal.add(source, number, lines, time.monotonic())
        if bar:
            self._equal.flush_rank(source)
        if last:
            self._equal.close_stream(source, number)
        self._show_merged()
        self._write(sink, b"")  # the bar

    def hold_traceback(self, source: Source, text: bytes) -> None:
        """Show this traceback, with which ``source`` has ended, unless the report of the job soon has it."""
        self._tracebacks[source] = text
        self._loop.call_later(TRACEBACK_S, self._show_tracebacks)

    def _show_tracebacks(self, verdict: FailureReport | None = None) -> None:
        """Show those that are not in the report of ``verdict``."""
        held, self._tracebacks = self._tracebacks, {}
        first = verdict.first if verdict and self.speaks else None
        reported = {first.rank, *verdict.alike} if verdict and first else set()
        count = (first.traceback or "").count(_TRACEBACK) if first else 0
        for source, text in held.items():
            if source not in reported or text.count(_TRACEBACK.encode()) != count:
                self.show_lines(source, 2, text)
                self._show_merged(math.inf)

    def _show_merged(self, until: float = 0.0) -> None:
        """Show what needs to wait for its equals no longer, and what came before ``until``."""
        self._equal.flush_until(until)
        shown: dict[Sink, bytearray] = {}
        for ranks, number, lines in self._equal.take_output():
            sink = self._sink(number)
            prefix = self._prefix_bytes(ranks[0] if len(ranks) == 1 else ranks, sink)
            shown.setdefault(sink, bytearray()).extend(add_prefix(prefix, lines))
        for sink, text in shown.items():
            self._write(sink, bytes(text))
        if not self._ticks and (due := self._equal.next_flush_time) is not None:
            self._ticks = True
            self._loop.call_later(max(0.0, due - time.monotonic()), self._on_flush_timer)

    def _on_flush_timer(self) -> None:
        self._ticks = False
        self._show_merged(time.monotonic() - HOLD_S)

    def _strip_torch_prefix(self, source: Source, lines: bytes) -> bytes:
        """Without the prefix that torch.distributed puts before a traceback, where ours says the same."""
        theirs = f"[rank{source}]: ".encode()
        if str(source) not in self._prefix_text(source):
            return lines
        return lines.removeprefix(theirs).replace(b"\n" + theirs, b"\n")

    def write_marker(self, line: bytes) -> None:
        """Show this line on stdout and on stderr, behind all that was shown there."""
        self._show_merged(math.inf)
        for sink in {self._stdout, self._stderr}:
            self._write(sink, line)

    def show_note(self, text: str, *, of_job: bool = False) -> None:
        """Say something ourselves, between whole lines of the ranks; ``of_job``: it concerns more than this node."""
        self.show_message(LogMessage(MessageKind.NOTE, text), of_job=of_job)

    def show_message(self, message: LogMessage, *, of_job: bool = False) -> None:
        """Say something of another kind, likewise."""
        if self.speaks or not of_job:
            self._show_merged(math.inf)
            self._write(self._stderr, FORMATTER.format(message).encode(errors="replace"))

    def show_footer(self, text: str, *, of_job: bool = False, waited: float = 0.0) -> None:
        """Show what we wait for, and for how long, ``waited`` included, until the ranks start or the job ends."""
        self._waiting.set_text(text if self.speaks or not of_job else "", waited)

    def suspend(self, stop: Callback) -> None:
        """Call ``stop``, which returns when we may go on (Ctrl-Z); meanwhile the terminal is another program's."""
        self._show_merged(math.inf)
        stop()

    def observe(self, event: Event) -> None:
        match event:
            case NoteAdded(text=text) | JobStalled(text=text) if text:
                self.show_note(text, of_job=True)
            case Restarting(attempt, wait, text, verdict):
                self._show_tracebacks()
                fields = {"attempt": attempt, "wait": wait, "verdict": verdict}
                self.show_message(LogMessage(MessageKind.RESTART, text, fields), of_job=True)
            case AttemptPlanned(plan=plan):
                FORMATTER.set_origin(plan)
                self._prefixes, self._width = make_prefixes(self._template, plan)
                self.show_footer("")
            case JobEnded(verdict=verdict):
                self._show_tracebacks(verdict)
                self.show_footer("")

    def _sink(self, number: int) -> Sink:
        return self._stdout if number == 1 else self._stderr

    def _write_footer(self, text: str) -> None:
        self.show_message(LogMessage(MessageKind.WAITING, text))

    def _write(self, sink: Sink, lines: bytes) -> None:
        sink.write(lines)

    def _prefix_text(self, source: Source | Sequence[int]) -> str:
        if isinstance(source, str):
            return f"[{source}]".ljust(self._width)
        if isinstance(source, int):
            return self._prefixes.get(source, "").ljust(self._width)
        marker, widest = format_for_ranks(self._template, source), format_for_ranks(self._template, [*self._prefixes])
        self._width = max(self._width, min(len(marker), len(widest)))  # from now on other lines are aligned with these
        return marker.ljust(self._width)

    def _prefix_bytes(self, source: Source | Sequence[int], sink: Sink) -> bytes:
        marker = self._prefix_text(source)
        return f"{marker} ".encode(errors="replace") if marker else b""


class TerminalScreen(Screen):
    """As ``Screen``; below all lines stays the progress bar of the lowest rank that draws one, or the footer."""

    def __init__(self, loop: EventLoop, how: ScreenOptions, *, speaks: bool, colour: bool) -> None:
        super().__init__(loop, how, reports_job=speaks)
        self._home = self._stderr if self._stderr.is_terminal else self._stdout
        self._colour = colour
        self._bars: dict[tuple[bool, Source, int], bytes] = {}
        self._below = b""
        self._drawn = False
        self._typed = b""  # the row in which a person types, the cursor in its place
        self._held: bytearray | None = None  # what waits while another program has the terminal

    @property
    def is_full(self) -> bool:
        return super().is_full or len(self._held or b"") > HIGH_WATER_BYTES

    def set_held(self, on: bool) -> None:
        """Show nothing, as another program draws on the terminal; or all that came meanwhile."""
        held, self._held = self._held, bytearray() if on else None
        if held:
            self._write(self._home, bytes(held))
            self._stdout.on_drained()

    def write_raw(self, data: bytes) -> None:
        """Write what that program draws."""
        self._home.write(data)

    def show_input_row(self, row: bytes) -> None:
        """Show a row in which a person types below all else; b"" shows none any more."""
        self._typed = row
        self._write(self._home, b"")

    def print_text(self, text: str) -> None:
        """Print what the person has asked for."""
        self._show_merged(math.inf)
        self._write(self._home, text.encode(errors="replace"))

    def show_lines(self, source: Source, number: int, lines: bytes, bar: bytes = b"", *, last: bool = False) -> None:
        key = (isinstance(source, str), source, number)
        if bar:
            self._bars[key] = bar
        else:
            self._bars.pop(key, None)
        super().show_lines(source, number, lines, bar, last=last)

    def _write_footer(self, text: str) -> None:
        if not self._stderr.is_terminal or FORMATTER.as_json:
            return super()._write_footer(text)
        self._below = f"ddplaunch: {text}".encode(errors="replace") if text else b""
        self._write(self._stderr, b"")

    def _write(self, sink: Sink, lines: bytes) -> None:
        if not sink.is_terminal:
            return sink.write(lines)
        if self._held is not None:
            self._held += lines
            return
        below = self._bottom_row(sink)
        if lines or below or self._drawn:
            sink.write((_CLEAR if self._drawn else b"") + lines + below)
        self._drawn = bool(below)

    def _bottom_row(self, sink: Sink) -> bytes:
        """The row below all lines: what is typed, the progress bar of the lowest rank, or the footer."""
        if self._typed:
            return self._typed if sink is self._home else b""
        here = [key for key in self._bars if self._sink(key[2]) is sink]
        if not here:
            return _truncate_row(self._below, 0) if sink is self._stderr else b""
        _, source, _ = lowest = min(here)
        return self._prefix_bytes(source, sink) + _truncate_row(self._bars[lowest], len(self._prefix_text(source)) + 1)

    def _prefix_bytes(self, source: Source | Sequence[int], sink: Sink) -> bytes:
        if not (self._colour and sink.is_terminal and self._prefix_text(source)):
            return super()._prefix_bytes(source, sink)
        several = _FAINT if isinstance(source, str) else _BOLD
        colour = _COLOURS[source % len(_COLOURS)] if isinstance(source, int) else several
        return f"\x1b[{colour}m{self._prefix_text(source)}\x1b[0m ".encode()


def _truncate_row(row: bytes, used: int) -> bytes:
    """Cut a row to the terminal's width: one that wraps cannot be drawn over."""
    columns, _ = window_size(1 if os.isatty(1) else 2)
    return row.decode(errors="replace")[: max(1, columns - used - 1)].encode()


def _same_file(one: int, two: int) -> bool:
    try:
        return os.path.sameopenfile(one, two)
    except OSError:
        return False
