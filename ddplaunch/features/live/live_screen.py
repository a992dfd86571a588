"""A terminal screen with a live view: rows below the scrolling log that are redrawn, or a full screen.

The rows come from a callback, which is called whenever they may have changed. All changes within a thirtieth of a
second are drawn in one write, so that nothing flickers.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ddplaunch.base.event_loop import Callback, EventLoop
from ddplaunch.base.text import display_width
from ddplaunch.base.tty import Keyboard, KeyDecoder, in_foreground, window_size
from ddplaunch.core.events import Event, JobEnded
from ddplaunch.core.node_config import ScreenOptions
from ddplaunch.core.output.log_message import LogMessage
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.core.output.sink import HIGH_WATER_BYTES, Sink
from ddplaunch.features.live.styled_rows import Row, render_row, row_width
from ddplaunch.observe.stacks_text import STACKS

FRAME_INTERVAL_S = 1 / 30  # between two drawings, at least
MAX_HELD_BYTES = 4 << 20  # of log lines that are held while the full screen is shown

RenderRows = Callable[[int, int, bool], Sequence[Row]]
"""Renders the rows for a terminal with so many columns and rows; the flag: whether for the full screen."""

_ENTER_FULL = b"\x1b[?1049h\x1b[?25l"
_LEAVE_FULL = b"\x1b[?25h\x1b[?1049l"
_STYLE = re.compile(r"\x1b\[[0-9;:]*m")


class LiveScreen(TerminalScreen):
    """A ``TerminalScreen`` with the rows of a live view below all lines of the log."""

    reads_keys = True

    def __init__(self, loop: EventLoop, how: ScreenOptions) -> None:
        super().__init__(loop, how)
        self._fd = 2 if self._stderr.is_terminal else 1
        self._render_rows: RenderRows | None = None
        self._rows: tuple[Row, ...] = ()
        self._rendered_for: tuple[int, int, bool] | None = None  # columns, rows, full; None: render again
        self._widths: list[int] = []  # of the rows below the log
        self._pending = bytearray()
        self._due = False
        self._last = 0.0
        self._held_lines: bytearray | None = None  # that came during the full screen; None while it is off
        self._dropped = 0  # how many held lines were dropped
        self._keyboard: Keyboard | None = None

    # ------------------------------------------------------------------------------------------------ what is drawn

    def begin(self, render: RenderRows, on_key: Callable[[str], object] | None) -> None:
        """Start drawing; ``on_key`` is called with each key; it is None if standard input belongs to a rank."""
        self._render_rows = render
        self._widths = [1] * self._drawn  # drawn by TerminalScreen
        if on_key is not None:
            decoder = KeyDecoder()
            self._keyboard = Keyboard(self._loop, lambda data: [on_key(key) for key in decoder.decode(data)])
            self._keyboard.start()
        self._loop.add_signal_handlers([signal.SIGWINCH], lambda number: self.refresh())
        self.refresh()

    def refresh(self) -> None:
        """Draw again, as the rows may have changed; frames are skipped while the terminal is behind."""
        if self._keyboard is not None:
            self._keyboard.start()  # it may have been lost, by Ctrl-Z and fg
        self._rendered_for = None
        if self._render_rows is not None and (self._home.is_drained or self._pending):
            self._schedule_draw()

    def print_text(self, text: str) -> None:
        """Print a text that the user requested into the log, so that the user can scroll back to it."""
        self.set_full_screen(False)
        self._write(self._home, (text if self._colour else _STYLE.sub("", text)).encode(errors="replace"))

    def show_message(self, message: LogMessage, *, of_job: bool = False) -> None:
        if message.kind == STACKS:  # the user has typed Ctrl-\ to see them
            self.set_full_screen(False)
        super().show_message(message, of_job=of_job)

    @property
    def is_full_screen(self) -> bool:
        return self._held_lines is not None

    def set_full_screen(self, on: bool) -> None:
        """Switch to the full screen, or back to the log, which then gets the lines held meanwhile."""
        if on == self.is_full_screen or self._render_rows is None:
            return
        if on:
            self._draw()
            self._home.write(self._erase_sequence() + _ENTER_FULL)
            self._held_lines = bytearray()
        else:
            self._home.write(_LEAVE_FULL)
            held, self._held_lines = self._held_lines or bytearray(), None
            if self._dropped:
                note = f"[ddplaunch] {self._dropped} lines dropped here: over 4 MiB came during the full screen\n"
                self._pending += note.encode()
                self._dropped = 0
            self._pending += held
        self.refresh()

    def end(self) -> None:
        """Draw the rows for the last time, as text that stays, and release the terminal."""
        if self._render_rows is None:
            return
        self.set_full_screen(False)
        self._rendered_for = None
        self._draw()
        self._render_rows = None
        if self._widths:
            self._widths = []
            self._home.write(b"\n")
        self._release_terminal()

    def close(self) -> None:
        """Release the terminal at once, also after an error."""
        if self.is_full_screen:
            self._held_lines = None
            with suppress(OSError):
                os.write(self._fd, _LEAVE_FULL)
        self._release_terminal()

    def _release_terminal(self) -> None:
        if self._keyboard is not None:
            self._keyboard.stop()
            self._keyboard = None

    def suspend(self, stop: Callback) -> None:
        if self._render_rows is None:
            stop()
            return
        full = self.is_full_screen
        self.set_full_screen(False)
        self._show_merged(math.inf)
        self._draw()
        self._home.write(self._erase_sequence())
        if self._keyboard is not None:
            self._keyboard.stop()
        stop()
        self.set_full_screen(full)
        self.refresh()

    def observe(self, event: Event) -> None:
        super().observe(event)
        if isinstance(event, JobEnded):
            self._loop.call_soon(self.end)  # after all other observers

    # -------------------------------------------------------------------------------------------------------- how

    @property
    def is_full(self) -> bool:
        return super().is_full or len(self._pending) > HIGH_WATER_BYTES

    @property
    def is_drained(self) -> bool:
        return super().is_drained and not self._pending

    def _write(self, sink: Sink, lines: bytes) -> None:
        if self._render_rows is None:
            return super()._write(sink, lines)
        if sink is not self._home:
            return sink.write(lines)
        self._pending += lines
        self._schedule_draw()

    def _schedule_draw(self) -> None:
        if self._due:
            return
        self._due = True
        wait = self._last + FRAME_INTERVAL_S - time.monotonic()
        if wait > 0:
            self._loop.call_later(wait, self._on_draw_timer)
        else:
            self._loop.call_soon(self._on_draw_timer)

    def _on_draw_timer(self) -> None:
        self._due = False
        self._draw()

    def _draw(self) -> None:
        self._last = time.monotonic()
        lines, self._pending = bytes(self._pending), bytearray()
        if self._held_lines is not None:
            self._hold_lines(lines)
            return self._draw_full()
        self._home.write(self._erase_sequence() + lines + self._frame())

    def _erase_sequence(self) -> bytes:
        """Return the bytes that move the cursor to the first drawn row, and clear the screen from there on.

        If the terminal was made narrower, it has wrapped the rows, as most terminals do.
        """
        if not self._widths:
            return b""
        across = max(1, window_size(self._fd)[0])
        up = sum(max(1, -(-each // across)) for each in self._widths) - 1
        self._widths = []
        return b"\r" + (f"\x1b[{up}A".encode() if up else b"") + b"\x1b[J"

    def _frame(self) -> bytes:
        """Render the rows below the log; none while the launcher is in the background (``&``)."""
        if self._render_rows is None or not in_foreground(self._fd):
            return b""
        bar = self._bottom_row(self._home).decode(errors="replace")
        rows = [render_row(row, self._colour) for row in self._render(False)]
        self._widths = [*[display_width(_STYLE.sub("", bar))] * bool(bar), *map(row_width, self._rows)]
        return "\n".join([*[bar] * bool(bar), *rows]).encode(errors="replace")

    def _draw_full(self) -> None:
        rows = (render_row(row, self._colour) for row in self._render(True))
        self._home.write(("\x1b[H" + "\x1b[K\n".join(rows) + "\x1b[K\x1b[J").encode(errors="replace"))

    def _render(self, full: bool) -> tuple[Row, ...]:
        wanted = (*window_size(self._fd), full)
        if self._render_rows is not None and wanted != self._rendered_for:
            self._rows, self._rendered_for = tuple(self._render_rows(*wanted)), wanted
        return self._rows

    def _hold_lines(self, lines: bytes) -> None:
        assert self._held_lines is not None
        self._held_lines += lines
        if len(self._held_lines) > MAX_HELD_BYTES:
            end = self._held_lines.find(b"\n", len(self._held_lines) - MAX_HELD_BYTES) + 1
            self._dropped += self._held_lines.count(b"\n", 0, end)
            del self._held_lines[:end]
