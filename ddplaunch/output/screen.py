"""Where people read what ranks print, and what we say ourselves: one ``Screen`` draws all of it.

It alone knows of terminals, colours and widths, and whether this node speaks where many print into one log.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from ddplaunch.control.failure import Verdict
from ddplaunch.dataclass import dataclass
from ddplaunch.loop import Callback, Loop
from ddplaunch.output.equal_lines import HOLD, EqualLines
from ddplaunch.output.events import Ended, Event, Noted, Planned, Restarting, Stalled
from ddplaunch.output.prefix import of_ranks, prefixed, prefixes
from ddplaunch.output.sink import HIGH_WATER, Sink
from ddplaunch.output.terminal import watched, window
from ddplaunch.output.voice import VOICE, Said, Topic
from ddplaunch.output.waiting import Waiting
from ddplaunch.words import counted

Source = int | str
"""Whose output it is: a rank's number, or the name of a sidecar."""

_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")  # ANSI's, by rank; red is left to errors
_FAINT = "2"  # of a sidecar
_BOLD = "1"  # of several ranks
_CLEAR = b"\r\x1b[K"


_TRACEBACK = "Traceback (most recent call last)"
TRACEBACK_S = 2.0  # seconds for the report to come; if others take longer to stop, the rank's own traceback is shown


@dataclass(frozen=True)
class Manner:
    """How a screen shows what ranks print: as in the policy."""

    patience: float
    quiet: float
    prefix: str
    merge: bool | None


def choose(loop: Loop, how: Manner, *, speaks: bool, colour: bool) -> Screen:
    """Make the screen for where our stdout and stderr lead."""
    if watched(1) or watched(2):
        return Terminal(loop, how, speaks=speaks, colour=colour)
    return Screen(loop, how, speaks=speaks)


class Screen:
    """Shows things to people: whole lines, each with its rank before it, for files, pipes and logs.

    It is an observer, too, of the notes in the events.
    """

    def __init__(self, loop: Loop, how: Manner, *, speaks: bool) -> None:
        """``speaks``: it says what concerns the job; where all nodes print into one log, node 0 alone does."""
        self._loop, self.speaks = loop, speaks
        self._stdout = Sink(loop, 1, how.patience)
        self._stderr = self._stdout if _same_file(1, 2) else Sink(loop, 2, how.patience)
        self.terminal = self._stdout.terminal
        self._template = how.prefix
        self._prefixes: dict[int, str] = {}
        self._width = 0
        self._merges = {n for n in (1, 2) if (self._sink(n).terminal if how.merge is None else how.merge)}
        self._equal = EqualLines()
        self._ticks = False
        self._tracebacks: dict[Source, bytes] = {}  # the last that these printed
        counts = self._stderr.terminal and not VOICE.for_machines
        self._waiting = Waiting(loop, self._show_footer, how.quiet, counts=counts)

    @property
    def full(self) -> bool:
        """Whether people are so far behind that the ranks should wait."""
        return self._stdout.full or self._stderr.full

    @property
    def written(self) -> bool:
        """Whether all that was shown is written."""
        return self._stdout.idle and self._stderr.idle

    @property
    def lost(self) -> str:
        """How much of the output on stdout a file has not taken, for people; "" where it has all."""
        lost = counted(self._stdout.lost, "line") if self._stdout.lost else ""
        return f"stdout could not be written: {lost} lost ({self._stdout.error})" if lost else ""

    def end(self) -> None:
        """The job has ended: from now on wait for a bounded time for what is not written yet."""
        for sink in {self._stdout, self._stderr}:
            sink.end()

    def when_relieved(self, callback: Callback) -> None:
        """Call it whenever there may be room again."""
        self._stdout.relieved = self._stderr.relieved = callback

    def lines(self, source: Source, number: int, lines: bytes, bar: bytes = b"", *, last: bool = False) -> None:
        """Show whole lines that came from descriptor ``number`` (1 or 2), and the progress bar that is drawn there.

        The first call, with lines or without, is made before the source prints there; ``last``: it prints no more.
        It is one replace for however many lines: no Python runs per line but where equal ones are sought.
        """
        sink = self._sink(number)
        if number == 2 and b"[rank" in lines and self._marker(source):
            lines = self._once(source, lines)
        if isinstance(source, str) or number not in self._merges:
            return self._show(sink, prefixed(self._prefix(source, sink), lines) if lines else b"")
        self._equal.add(source, number, lines, time.monotonic())
        if bar:
            self._equal.finish(source)
        if last:
            self._equal.end(source, number)
        self._show_merged()
        self._show(sink, b"")  # the bar

    def hold_traceback(self, source: Source, text: bytes) -> None:
        """Show this traceback, with which ``source`` has ended, unless the report of the job soon has it."""
        self._tracebacks[source] = text
        self._loop.after(TRACEBACK_S, self._show_tracebacks)

    def _show_tracebacks(self, verdict: Verdict | None = None) -> None:
        """Show those that are not in the report of ``verdict``."""
        held, self._tracebacks = self._tracebacks, {}
        first = verdict.first if verdict and self.speaks else None
        reported = {first.rank, *verdict.alike} if verdict and first else set()
        count = (first.traceback or "").count(_TRACEBACK) if first else 0
        for source, text in held.items():
            if source not in reported or text.count(_TRACEBACK.encode()) != count:
                self.lines(source, 2, text)
                self._show_merged(math.inf)

    def _show_merged(self, until: float = 0.0) -> None:
        """Show what needs to wait for its equals no longer, and what came before ``until``."""
        self._equal.let_go(until)
        shown: dict[Sink, bytearray] = {}
        for ranks, number, lines in self._equal.taken():
            sink = self._sink(number)
            prefix = self._prefix(ranks[0] if len(ranks) == 1 else ranks, sink)
            shown.setdefault(sink, bytearray()).extend(prefixed(prefix, lines))
        for sink, text in shown.items():
            self._show(sink, bytes(text))
        if not self._ticks and (due := self._equal.due) is not None:
            self._ticks = True
            self._loop.after(max(0.0, due - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._ticks = False
        self._show_merged(time.monotonic() - HOLD)

    def _once(self, source: Source, lines: bytes) -> bytes:
        """Without the prefix that torch.distributed puts before a traceback, where ours says the same."""
        theirs = f"[rank{source}]: ".encode()
        if str(source) not in self._marker(source):
            return lines
        return lines.removeprefix(theirs).replace(b"\n" + theirs, b"\n")

    def mark(self, line: bytes) -> None:
        """Show this line on stdout and on stderr, behind all that was shown there."""
        self._show_merged(math.inf)
        for sink in {self._stdout, self._stderr}:
            self._show(sink, line)

    def note(self, text: str, *, of_job: bool = False) -> None:
        """Say something ourselves, between whole lines of the ranks; ``of_job``: it concerns more than this node."""
        self.say(Said(Topic.NOTE, text), of_job=of_job)

    def say(self, said: Said, *, of_job: bool = False) -> None:
        """Say something of another kind, likewise."""
        if self.speaks or not of_job:
            self._show_merged(math.inf)
            self._show(self._stderr, VOICE.form(said).encode(errors="replace"))

    def footer(self, text: str, *, of_job: bool = False, waited: float = 0.0) -> None:
        """Show what we wait for, and for how long, ``waited`` included, until the ranks start or the job ends."""
        self._waiting.tell(text if self.speaks or not of_job else "", waited)

    def suspend(self, stop: Callback) -> None:
        """Call ``stop``, which returns when we may go on (Ctrl-Z); meanwhile the terminal is another program's."""
        self._show_merged(math.inf)
        stop()

    def observe(self, event: Event) -> None:
        match event:
            case Noted(text=text) | Stalled(text=text) if text:
                self.note(text, of_job=True)
            case Restarting(attempt, wait, text, verdict):
                self._show_tracebacks()
                fields = {"attempt": attempt, "wait": wait, "verdict": verdict}
                self.say(Said(Topic.RESTART, text, fields), of_job=True)
            case Planned(plan=plan):
                VOICE.of(plan)
                self._prefixes, self._width = prefixes(self._template, plan)
                self.footer("")
            case Ended(verdict=verdict):
                self._show_tracebacks(verdict)
                self.footer("")

    def _sink(self, number: int) -> Sink:
        return self._stdout if number == 1 else self._stderr

    def _show_footer(self, text: str) -> None:
        self.say(Said(Topic.WAITING, text))

    def _show(self, sink: Sink, lines: bytes) -> None:
        sink.write(lines)

    def _marker(self, source: Source | Sequence[int]) -> str:
        if isinstance(source, str):
            return f"[{source}]".ljust(self._width)
        if isinstance(source, int):
            return self._prefixes.get(source, "").ljust(self._width)
        marker, widest = of_ranks(self._template, source), of_ranks(self._template, [*self._prefixes])
        self._width = max(self._width, min(len(marker), len(widest)))  # from now on other lines are aligned with these
        return marker.ljust(self._width)

    def _prefix(self, source: Source | Sequence[int], sink: Sink) -> bytes:
        marker = self._marker(source)
        return f"{marker} ".encode(errors="replace") if marker else b""


class Terminal(Screen):
    """As ``Screen``; below all lines stays the progress bar of the lowest rank that draws one, or the footer."""

    def __init__(self, loop: Loop, how: Manner, *, speaks: bool, colour: bool) -> None:
        super().__init__(loop, how, speaks=speaks)
        self._home = self._stderr if self._stderr.terminal else self._stdout
        self._colour = colour
        self._bars: dict[tuple[bool, Source, int], bytes] = {}
        self._below = b""
        self._drawn = False
        self._typed = b""  # the row in which a person types, the cursor in its place
        self._held: bytearray | None = None  # what waits while another program has the terminal

    @property
    def full(self) -> bool:
        return super().full or len(self._held or b"") > HIGH_WATER

    def hold(self, on: bool) -> None:
        """Show nothing, as another program draws on the terminal; or all that came meanwhile."""
        held, self._held = self._held, bytearray() if on else None
        if held:
            self._show(self._home, bytes(held))
            self._stdout.relieved()

    def draw(self, data: bytes) -> None:
        """Write what that program draws."""
        self._home.write(data)

    def type_row(self, row: bytes) -> None:
        """Show a row in which a person types below all else; b"" shows none any more."""
        self._typed = row
        self._show(self._home, b"")

    def page(self, text: str) -> None:
        """Print what the person has asked for."""
        self._show_merged(math.inf)
        self._show(self._home, text.encode(errors="replace"))

    def lines(self, source: Source, number: int, lines: bytes, bar: bytes = b"", *, last: bool = False) -> None:
        key = (isinstance(source, str), source, number)
        if bar:
            self._bars[key] = bar
        else:
            self._bars.pop(key, None)
        super().lines(source, number, lines, bar, last=last)

    def _show_footer(self, text: str) -> None:
        if not self._stderr.terminal or VOICE.for_machines:
            return super()._show_footer(text)
        self._below = f"ddplaunch: {text}".encode(errors="replace") if text else b""
        self._show(self._stderr, b"")

    def _show(self, sink: Sink, lines: bytes) -> None:
        if not sink.terminal:
            return sink.write(lines)
        if self._held is not None:
            self._held += lines
            return
        below = self._bottom(sink)
        if lines or below or self._drawn:
            sink.write((_CLEAR if self._drawn else b"") + lines + below)
        self._drawn = bool(below)

    def _bottom(self, sink: Sink) -> bytes:
        """The row below all lines: what is typed, the progress bar of the lowest rank, or the footer."""
        if self._typed:
            return self._typed if sink is self._home else b""
        here = [key for key in self._bars if self._sink(key[2]) is sink]
        if not here:
            return _fit(self._below, 0) if sink is self._stderr else b""
        _, source, _ = lowest = min(here)
        return self._prefix(source, sink) + _fit(self._bars[lowest], len(self._marker(source)) + 1)

    def _prefix(self, source: Source | Sequence[int], sink: Sink) -> bytes:
        if not (self._colour and sink.terminal and self._marker(source)):
            return super()._prefix(source, sink)
        several = _FAINT if isinstance(source, str) else _BOLD
        colour = _COLOURS[source % len(_COLOURS)] if isinstance(source, int) else several
        return f"\x1b[{colour}m{self._marker(source)}\x1b[0m ".encode()


def _fit(row: bytes, used: int) -> bytes:
    """Cut a row to the terminal's width: one that wraps cannot be drawn over."""
    columns, _ = window(1 if os.isatty(1) else 2)
    return row.decode(errors="replace")[: max(1, columns - used - 1)].encode()


def _same_file(one: int, two: int) -> bool:
    try:
        return os.path.sameopenfile(one, two)
    except OSError:
        return False
