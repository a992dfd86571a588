"""A wait as people see it: a line that counts the seconds in a terminal, a few lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.loop import Loop, Timer
from ddplaunch.words import clock

REPEAT = 30.0  # seconds after which a log gets the same line again


class Waiting:
    """One wait after the other, each from the first thing told of it until there is nothing to wait for."""

    def __init__(self, loop: Loop, show: Callable[[str], None], quiet: float, *, counts: bool) -> None:
        """``show`` gets each line, "" where there is none any more; ``quiet``: seconds of a wait without a line."""
        self._loop, self._show, self._quiet = loop, show, quiet
        self._every = 1.0 if counts else REPEAT
        self._text = ""
        self._began = 0.0
        self._timer: Timer | None = None

    def tell(self, text: str) -> None:
        """Say whom or what we wait for, if it is something new; "" ends the wait."""
        if text == self._text:
            return
        if not self._text:
            self._began = time.monotonic()
        self._text = text
        self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waited = time.monotonic() - self._began
        if not self._text:
            self._show("")
        elif waited < self._quiet:
            self._timer = self._loop.after(self._quiet - waited, self._tick)
        else:
            self._show(f"{self._text} ({clock(waited)})")
            self._timer = self._loop.after(self._every - waited % 1, self._tick)
