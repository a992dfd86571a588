"""A rank in its debugger, and the interface that a user's prompt offers to the debug server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from ddplaunch.base.connection import Connection
from ddplaunch.base.event_loop import Timer
from ddplaunch.features.debug.messages import FromDebugger, RankStopped
from ddplaunch.features.debug.rank_terminal import RankTerminal


class Debuggee(Struct):
    """A rank that has stopped in its debugger at least once; ``stopped``: where it is stopped now; None if it runs."""

    connection: Connection[FromDebugger]
    stopped: RankStopped | None = None
    is_stepping: bool = False
    tool: str = ""  # its debugger, which draws on the terminal of the rank; "" for lines
    is_arriving: bool = False  # it has just stopped: its prompt follows
    is_leaving: bool = False  # it has been resumed, but has not reported it: it reads no line
    detached: bool = False  # its user has left; it may notice that only at its next stop
    output: bytes = b""  # since it stopped, or since the last input line
    prompt: str = ""  # of the input line that it waits for; "" while it runs
    timer: Timer | None = None
    terminal: RankTerminal | None = None  # for a debugger that needs one

    @property
    def is_active(self) -> bool:
        """Whether the rank is in its debugger, or will soon be again."""
        return self.stopped is not None or self.is_stepping

    def set_running(self, *, steps: bool) -> None:
        """Called when the rank continues to run; ``steps``: it will stop again soon."""
        self.stopped, self.is_stepping, self.is_arriving, self.is_leaving, self.prompt = None, steps, False, False, ""
        if not steps:
            self.tool = ""
            if self.terminal:
                self.terminal.scrollback = b""

    def end_terminal(self) -> None:
        if self.terminal:
            self.terminal.close()
        self.terminal = None


class DebugUser(Protocol):
    """The prompt of one user; its methods are called only while this user is in control."""

    guard: Callable[[Callable[..., None]], Callable[..., None]]
    """Isolates the user's prompt: a bug in it affects this client, but no rank."""

    def on_attached(self) -> None: ...
    def on_taken_over(self) -> None: ...
    def on_message(self, message: FromDebugger) -> None: ...  # of a rank, whose state has changed already
    def on_terminal_output(self, rank: int, data: bytes) -> None: ...
    def show_note(self, text: str) -> None: ...
    def refuse(self, text: str) -> None: ...  # the rank that the user has requested cannot be stopped
