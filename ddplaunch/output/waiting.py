"""What people read while the job waits: for what, and for how long; and that a start takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.loop import Loop, Timer
from ddplaunch.output.events import Ended, Event, Planned, Ready, Signalled, Started, Swept
from ddplaunch.words import clock, counted, named

if TYPE_CHECKING:
    from ddplaunch.output.screen import Screen

REPEAT = 30.0  # seconds after which a log gets the same line again
PATIENCE = 5.0  # seconds of a start without a word


class Waiting:
    """One wait after the other, each from its first line until there is nothing to wait for."""

    def __init__(self, loop: Loop, show: Callable[[str], None], quiet: float, *, counts: bool) -> None:
        """``show`` gets each line, "" where there is none any more; ``quiet``: seconds of a wait without a line."""
        self._loop, self._show, self._quiet = loop, show, quiet
        self._every = 1.0 if counts else REPEAT
        self._text = ""
        self._began = 0.0
        self._timer: Timer | None = None

    def tell(self, text: str, waited: float = 0.0) -> None:
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
            self._timer = self._loop.after(self._quiet - waited, self._tick)
        else:
            self._show(f"{self._text} ({clock(waited)})")
            self._timer = self._loop.after(self._every - waited % 1, self._tick)


class Starting:
    """An observer of the events of a start: where it takes long, it says for what, until every rank has a process."""

    def __init__(self, loop: Loop, screen: Screen, modules: Sequence[str]) -> None:
        """``modules`` are what is imported once for all ranks."""
        self._loop, self._screen, self._modules = loop, screen, modules
        self._awaited = ""
        self._left = 0  # ranks without a process
        self._timer: Timer | None = None
        self._told = False

    def observe(self, event: Event) -> None:
        match event:
            case Planned(plan=plan):
                self._left = len(plan.local_ranks)
                self._awaited = f"the import of {named(self._modules)}" if self._modules else "Python"
                self._begin()
            case Ready():
                self._awaited = "their processes"
                if self._timer is not None:
                    self._begin()
            case Started():
                self._left -= 1
                if not self._left:
                    self._end()
            case Signalled() | Swept() | Ended():
                self._end()

    def _begin(self) -> None:
        self._end()
        self._timer = self._loop.after(PATIENCE, self._tell)

    def _tell(self) -> None:
        self._told = True
        text = f"starting {counted(self._left, 'rank')}: waiting for {self._awaited}"
        self._screen.footer(text, of_job=True, waited=PATIENCE)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._told:
            self._told = False
            self._screen.footer("", of_job=True)
