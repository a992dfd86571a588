"""What people read while the job waits: for what, and for how long; and that a start takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.loop import EventLoop, Timer
from ddplaunch.output.events import (
    AttemptPlanned,
    AttemptSwept,
    Event,
    JobEnded,
    RankStarted,
    SignalReceived,
    ZygoteReady,
)
from ddplaunch.words import format_clock, format_count, join_names

if TYPE_CHECKING:
    from ddplaunch.output.screen import Screen

LOG_REPEAT_S = 30.0  # seconds after which a log gets the same line again
STARTUP_NOTICE_DELAY_S = 5.0  # seconds of a start without a word


class WaitFooter:
    """One wait after the other, each from its first line until there is nothing to wait for."""

    def __init__(self, loop: EventLoop, show: Callable[[str], None], quiet_s: float, *, shows_seconds: bool) -> None:
        """``show`` gets each line, "" where there is none any more; ``quiet_s``: seconds of a wait without a line."""
        self._loop, self._show, self._quiet = loop, show, quiet_s
        self._every = 1.0 if shows_seconds else LOG_REPEAT_S
        self._text = ""
        self._began = 0.0
        self._timer: Timer | None = None

    def set_text(self, text: str, waited: float = 0.0) -> None:
        """Say whom or what we wait for, if it is something new, and have ``waited`` for already; "" ends the wait."""
        if text == self._text:
            return
        if not self._text:
            self._began = time.monotonic() - waited
        self._text = text
        self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waited = time.monotonic() - self._began
        if not self._text:
            self._show("")
        elif waited < self._quiet:
            self._timer = self._loop.call_later(self._quiet - waited, self._tick)
        else:
            self._show(f"{self._text} ({format_clock(waited)})")
            self._timer = self._loop.call_later(self._every - waited % 1, self._tick)


class StartupNotice:
    """An observer of the events of a start: where it takes long, it says for what, until every rank has a process."""

    def __init__(self, loop: EventLoop, screen: Screen, modules: Sequence[str]) -> None:
        """``modules`` are what is imported once for all ranks."""
        self._loop, self._screen, self._modules = loop, screen, modules
        self._awaited = ""
        self._left = 0  # ranks without a process
        self._timer: Timer | None = None
        self._told = False

    def observe(self, event: Event) -> None:
        match event:
            case AttemptPlanned(plan=plan):
                self._left = len(plan.local_ranks)
                self._awaited = f"the import of {join_names(self._modules)}" if self._modules else "Python"
                self._begin()
            case ZygoteReady():
                self._awaited = "their processes"
                if self._timer is not None:
                    self._begin()
            case RankStarted():
                self._left -= 1
                if not self._left:
                    self._end()
            case SignalReceived() | AttemptSwept() | JobEnded():
                self._end()

    def _begin(self) -> None:
        self._end()
        self._timer = self._loop.call_later(STARTUP_NOTICE_DELAY_S, self._show_notice)

    def _show_notice(self) -> None:
        self._told = True
        text = f"starting {format_count(self._left, 'rank')}: waiting for {self._awaited}"
        self._screen.show_footer(text, of_job=True, waited=STARTUP_NOTICE_DELAY_S)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._told:
            self._told = False
            self._screen.show_footer("", of_job=True)
