"""The terminals at which users debug: the launcher's own, below the log, and those of ``ddplaunch debug``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.tty import Keyboard, in_foreground, window_size
from ddplaunch.core.output.screen import TerminalScreen
from ddplaunch.features.debug.messages import UserOutput

ESCAPE_KEY = b"\x1d"  # Ctrl-]: leaves a program that gets all other keys
CLEAR_ROW = b"\r\x1b[K"
RESET_TERMINAL = b"\x1b[?1049;1000;1002;1003;1006;2004;1l\x1b[?25;7h\x1b[0m\x1b>" + CLEAR_ROW
"""Resets what a program may have changed of a terminal: screen, cursor, mouse, paste and keypad."""

_MAX_OUTPUT_BYTES = 1 << 20  # of one message
_MAX_COLUMNS = 4096  # of a client's terminal
_MAX_HELD_BYTES = 64 << 10  # of text, while a program draws on the terminal


class RemoteTerminal:
    """The terminal or pipe of a ``ddplaunch debug``, which shows what the launcher sends."""

    is_remote = True

    def __init__(self, send: Callable[[UserOutput], None], finish: Callable[[], None], columns: int, rows: int) -> None:
        """``finish`` closes the connection once all is sent; ``columns``: 0 for a pipe."""
        self._send, self._finish = send, finish
        self.size = min(columns, _MAX_COLUMNS), rows
        self.is_pipe = not columns
        self._row = b""
        self._held: bytes | None = None  # text, while the terminal is lent
        self.has_input = False  # that has not been handled

    def set_size(self, columns: int, rows: int) -> None:
        self.size = min(columns, _MAX_COLUMNS), rows
        if self._row:
            self._row = b""
            self.draw(CLEAR_ROW)

    def show(self, text: str) -> None:
        """Show complete lines of text, above the input row."""
        data = text.encode(errors="replace")
        if self._held is not None:
            self._held = (self._held + data)[-_MAX_HELD_BYTES:]
        else:
            self.draw((CLEAR_ROW if self._row else b"") + data + self._row)

    def show_row(self, row: bytes, *, reads_keys: bool) -> None:
        """Show the input row, b"" for none; ``reads_keys``: the prompt uses the keyboard, or will soon."""
        if row != self._row:
            before, self._row = self._row, row
            self.draw((CLEAR_ROW if before else b"") + row)

    def lend(self, on: bool) -> None:
        """Begin or end (``on``) to lend the terminal to a program: it gets all keys, and text is shown afterwards."""
        if on:
            self.show_row(b"", reads_keys=True)
            self._held = b""
            return self._send(UserOutput(is_raw=True))
        held, self._held = self._held or b"", None
        self.draw(RESET_TERMINAL + held)

    def draw(self, data: bytes) -> None:
        """Write the output of a program that draws on the terminal, or other bytes."""
        for begin in range(0, len(data), _MAX_OUTPUT_BYTES):
            self._send(UserOutput(data[begin : begin + _MAX_OUTPUT_BYTES], is_raw=self._held is not None))

    def take_input(self) -> None:
        """Called when the last input has been handled: the client may send more."""
        if self.has_input:
            self.has_input = False
            self._send(UserOutput(is_raw=self._held is not None, is_input_taken=True))

    def leave(self, code: int) -> None:
        """End the session; ``code`` is the exit code of the client."""
        if self._held is not None:
            self.lend(False)
        self._send(UserOutput(exit_code=code))
        self._finish()


class LocalTerminal:
    """The launcher's own terminal; its keys are read while a rank is in its debugger."""

    is_remote = is_pipe = False

    def __init__(self, loop: EventLoop, screen: TerminalScreen) -> None:
        self._loop, self._screen = loop, screen
        self.on_input: Callable[[bytes], None] = lambda data: None
        self.on_resize: Callable[[], None] = lambda: None
        self._keyboard = Keyboard(loop, lambda data: self.on_input(data))
        self._reads_keys = self._is_lent = False
        loop.add_signal_handlers([signal.SIGWINCH, signal.SIGCONT], lambda number: self._restore())
        loop.add_signal_handlers([signal.SIGTSTP], lambda number: self._on_suspend())

    @property
    def size(self) -> tuple[int, int]:
        return window_size(2 if os.isatty(2) else 1) if in_foreground(0) else (0, 0)

    def show(self, text: str) -> None:
        self._screen.print_text(text)

    def show_row(self, row: bytes, *, reads_keys: bool) -> None:
        if not (reads_keys or self._reads_keys):
            return  # the row is the log's
        self._reads_keys = reads_keys
        if reads_keys:
            self._keyboard.start()
        self._screen.show_input_row(row)
        if not reads_keys:
            self._keyboard.stop()

    def lend(self, on: bool) -> None:
        self._is_lent = on
        if on:
            self._screen.show_input_row(b"")
            self._screen.hold_output(True)
            self._keyboard.start(raw=True)
        else:
            self._keyboard.stop()
            self._screen.write_raw(RESET_TERMINAL)
            self._screen.hold_output(False)

    def draw(self, data: bytes) -> None:
        self._screen.write_raw(data)

    def take_input(self) -> None:
        """Do nothing: no client waits for this confirmation."""

    def leave(self, code: int) -> None:
        """Do nothing: the launcher keeps its own terminal."""

    def close(self) -> None:
        """Release the terminal."""
        if self._is_lent:
            self.lend(False)
        self._reads_keys = False
        self._screen.show_input_row(b"")
        self._keyboard.stop()

    def _restore(self) -> None:
        if self._reads_keys or self._is_lent:
            self._keyboard.start(raw=self._is_lent)
            self.on_resize()

    def _on_suspend(self) -> None:
        """Called before this process is suspended: the posted callback runs after it is continued."""
        self._screen.show_input_row(b"")
        self._keyboard.stop()
        self._loop.call_soon(self._restore)
