"""The wait footer: what the job is waiting for and for how long; and a notice when the start takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.text import format_clock, format_count, join_names
from ddplaunch.core.events import (
    AttemptPlanned,
    AttemptSwept,
    Event,
    JobEnded,
    RankStarted,
    SignalReceived,
    ZygoteReady,
)

if TYPE_CHECKING:
    from ddplaunch.core.output.screen import Screen

LOG_REPEAT_S = 30.0  # in a log the line is repeated at this interval
STARTUP_NOTICE_DELAY_S = 5.0  # a shorter start is silent


class WaitFooter:
    """Shows one wait at a time with its duration, and updates it until the wait is over."""

    def __init__(self, loop: EventLoop, show: Callable[[str], None], quiet_s: float, *, shows_seconds: bool) -> None:
        """``show`` gets each line, "" to remove it; during the first ``quiet_s`` of a wait nothing is shown."""
        self._loop, self._show, self._quiet_s = loop, show, quiet_s
        self._interval_s = 1.0 if shows_seconds else LOG_REPEAT_S
        self._text = ""
        self._start = 0.0
        self._timer: Timer | None = None

    def set_text(self, text: str, waited: float = 0.0) -> None:
        """Start a wait, or change its text; ``waited``: its duration so far, in seconds; "" ends the wait."""
        if text == self._text:
            return
        if not self._text:
            self._start = time.monotonic() - waited
        self._text = text
        self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waited = time.monotonic() - self._start
        if not self._text:
            self._show("")
        elif waited < self._quiet_s:
            self._timer = self._loop.call_later(self._quiet_s - waited, self._tick)
        else:
            self._show(f"{self._text} ({format_clock(waited)})")
            self._timer = self._loop.call_later(self._interval_s - waited % 1, self._tick)


class StartupNotice:
    """Observer that shows what a slow start is waiting for, until every rank has a process."""

    def __init__(self, loop: EventLoop, screen: Screen, modules: Sequence[str]) -> None:
        """``modules``: preloaded for all ranks."""
        self._loop, self._screen, self._modules = loop, screen, modules
        self._awaited = ""
        self._pending_ranks = 0  # without a process
        self._timer: Timer | None = None
        self._is_shown = False

    def observe(self, event: Event) -> None:
        match event:
            case AttemptPlanned(plan=plan):
                self._pending_ranks = len(plan.local_ranks)
                self._awaited = f"the import of {join_names(self._modules)}" if self._modules else "Python"
                self._begin()
            case ZygoteReady():
                self._awaited = "their processes"
                if self._timer is not None:
                    self._begin()
            case RankStarted():
                self._pending_ranks -= 1
                if not self._pending_ranks:
                    self._end()
            case SignalReceived() | AttemptSwept() | JobEnded():
                self._end()

    def _begin(self) -> None:
        self._end()
        self._timer = self._loop.call_later(STARTUP_NOTICE_DELAY_S, self._show_notice)

    def _show_notice(self) -> None:
        self._is_shown = True
        text = f"starting {format_count(self._pending_ranks, 'rank')}: waiting for {self._awaited}"
        self._screen.show_footer(text, of_job=True, waited=STARTUP_NOTICE_DELAY_S)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_shown:
            self._is_shown = False
            self._screen.show_footer("", of_job=True)
