"""The wait footer: what the job is waiting for and for how long."""

from __future__ import annotations

import time
from typing import Protocol

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.text import format_minutes

LOG_REPEAT_S = 30.0  # in a log the line is repeated at this interval


class FooterDisplay(Protocol):
    """Where the footer is shown."""

    def write_footer(self, text: str) -> None:
        """Show a line in place of the last one; "" removes it."""


class WaitFooter:
    """Shows one wait at a time with its duration, and updates it until the wait is over."""

    def __init__(self, loop: EventLoop, display: FooterDisplay, quiet_s: float, *, shows_seconds: bool) -> None:
        """During the first ``quiet_s`` of a wait nothing is shown."""
        self._loop, self._display, self._quiet_s = loop, display, quiet_s
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
            self._display.write_footer("")
        elif waited < self._quiet_s:
            self._timer = self._loop.call_later(self._quiet_s - waited, self._tick)
        else:
            self._display.write_footer(f"{self._text} ({format_minutes(waited)})")
            self._timer = self._loop.call_later(self._interval_s - waited % 1, self._tick)
