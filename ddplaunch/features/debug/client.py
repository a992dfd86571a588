"""The client of ``ddplaunch debug``: sends the user's keys or lines to the launcher, and shows the bytes it gets."""

from __future__ import annotations

import os
import signal

from ddplaunch.base.connection import Connection
from ddplaunch.base.errors import EXIT_SIGNAL
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.tty import (
    Keyboard,
    can_move_cursor,
    in_foreground,
    is_interactive,
    keep_terminal_settings,
    window_size,
)
from ddplaunch.cli.client import REPLY_TIMEOUT_S, open_request
from ddplaunch.core.output.sink import Sink
from ddplaunch.features.debug.messages import MAX_INPUT_BYTES, KeyInput, TerminalResized, UserOutput
from ddplaunch.features.debug.request import DebugRanks
from ddplaunch.features.debug.user_terminals import CLEAR_ROW, ESCAPE_KEY, RESET_TERMINAL

STUCK_TIMEOUT_S = 86400.0  # the user may have stopped the output, by Ctrl-S or a pager


class DebugClient:
    """Connects one user's terminal or pipe to a job."""

    def __init__(self, path: str, rank: int | None) -> None:
        """Connect to the control socket at ``path``; raise JobNotResponding if that fails."""
        self._loop = EventLoop()
        self._at_terminal = os.isatty(0) and is_interactive(1) and can_move_cursor()
        self._output = Sink(self._loop, 1, STUCK_TIMEOUT_S)
        self._keyboard = Keyboard(self._loop, self._send_input)
        self._is_lent = False  # to a program that draws on the terminal
        self._is_raw = self._input_ended = False
        self._has_sent_input = False  # which the launcher has not handled
        self._unsent_input = b""
        self._code: int | None = None
        request = DebugRanks(rank, *(window_size(1) if self._at_terminal else (0, 0)))
        with open_request(path, request, REPLY_TIMEOUT_S) as sock:
            self._connection = Connection[UserOutput](
                self._loop, sock.dup(), request.answers, self._on_output, lambda why: self._on_lost()
            )

    def run(self) -> int:
        """Send the user's input until the user leaves or the job ends; return the exit code."""
        with keep_terminal_settings():
            self._loop.add_signal_handlers(
                [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], self._on_signal
            )
            if self._at_terminal:
                self._loop.add_signal_handlers([signal.SIGTSTP], lambda number: self._suspend())
                self._loop.add_signal_handlers(
                    [signal.SIGWINCH, signal.SIGCONT], lambda number: self._restore_terminal()
                )
                if not in_foreground(0):
                    self._restore_terminal()
            self._watch_input()
            while self._code is None or not (self._output.is_drained or self._code >= EXIT_SIGNAL):
                self._loop.run_once()
            self._reset_row()
            self._keyboard.stop()
        return self._code

    def _on_output(self, message: UserOutput) -> None:
        self._is_lent = message.is_raw
        if message.is_raw != self._is_raw:
            self._is_raw = message.is_raw
            self._start_keyboard()
        self._output.write(message.data)
        if message.is_input_taken:
            self._has_sent_input = False
            if self._unsent_input:
                self._send_input(b"")
            else:
                self._watch_input()
        if message.exit_code is not None:
            self._code = message.exit_code

    def _on_lost(self) -> None:
        if self._code is None:
            self._reset_row()
            self._output.write(b"ddplaunch: the job has ended\n")
            self._code = 0

    def _on_signal(self, number: int) -> None:
        self._code = EXIT_SIGNAL + number

    def _reset_row(self) -> None:
        if self._at_terminal:
            self._output.write(RESET_TERMINAL if self._is_lent else CLEAR_ROW)
        self._is_lent = self._is_raw = False

    def _suspend(self) -> None:
        self._output.write(CLEAR_ROW)
        self._keyboard.stop()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _restore_terminal(self) -> None:
        """Called when the terminal is resized or this client is resumed: read keys, and send the terminal's size."""
        self._start_keyboard()
        self._connection.send(TerminalResized(*(window_size(1) if in_foreground(0) else (0, 0))))

    def _start_keyboard(self) -> None:
        """Read keys; in raw mode even while the launcher handles earlier keys, so that ``ESCAPE_KEY`` is read."""
        self._keyboard.start(raw=self._is_raw)
        if self._has_sent_input and not (self._is_raw and len(self._unsent_input) < MAX_INPUT_BYTES):
            self._keyboard.pause()

    def _watch_input(self) -> None:
        """Wait for the next input of the user: keys at a terminal, or data in a pipe or file."""
        if self._at_terminal:
            return self._start_keyboard()
        if self._input_ended:  # a closed pipe is always readable
            return
        try:
            self._loop.watch_fd(0, self._on_readable)
        except PermissionError:  # a regular file, which epoll refuses: it can be read at once
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        data = os.read(0, MAX_INPUT_BYTES)
        self._input_ended = not data
        self._send_input(data)

    def _send_input(self, data: bytes) -> None:
        """Send input to the launcher; later input is kept until the launcher has handled this."""
        self._is_raw &= ESCAPE_KEY not in data  # Ctrl-C works after it, whether or not the launcher does
        self._unsent_input += data
        if not self._has_sent_input:
            self._has_sent_input = True
            data, self._unsent_input = self._unsent_input[:MAX_INPUT_BYTES], self._unsent_input[MAX_INPUT_BYTES:]
            self._connection.send(KeyInput(data))
        if self._at_terminal:
            self._start_keyboard()
        else:
            self._loop.unwatch_fd(0)
