"""What a person sees while the job waits for its nodes: a line that counts in a terminal, a few in a log."""

from __future__ import annotations

import time

from ddplaunch.loop import Loop, Timer
from ddplaunch.output.streams import Output
from ddplaunch.words import clock

REPEAT = 30.0
"""Seconds after which a log gets the same line again."""


class Waiting:
    """One wait, from the first thing told of it to ``over``."""

    def __init__(self, loop: Loop, output: Output, quiet: float) -> None:
        """``quiet``: seconds for which a wait is nothing to tell of."""
        self._loop = loop
        self._output = output
        self._quiet = quiet
        self._text = ""
        self._began = 0.0
        self._timer: Timer | None = None

    def tell(self, text: str) -> None:
        """Say whom or what we wait for, if it is something new."""
        if text == self._text:
            return
        if not self._text:
            self._began = time.monotonic()
        self._text = text
        self._show()

    def over(self) -> None:
        self._text = ""
        self._output.status("")
        if self._timer is not None:
            self._timer.cancel()

    def _show(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waited = time.monotonic() - self._began
        if waited < self._quiet:
            self._timer = self._loop.after(self._quiet - waited, self._show)
            return
        line = f"ddplaunch: {self._text} ({clock(waited)})"
        if self._output.stderr.terminal:
            self._output.status(line)
            self._timer = self._loop.after(1 - waited % 1, self._show)
        else:
            self._output.say(line + "\n")
            self._timer = self._loop.after(REPEAT, self._show)
