"""A start that takes long says what it waits for, until every rank of this node has a process."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.loop import Loop, Timer
from ddplaunch.output.events import Ended, Event, Planned, Ready, Signalled, Started, Swept
from ddplaunch.output.screen import Screen
from ddplaunch.words import counted, named

PATIENCE = 5.0  # seconds of a start without a word


class Starting:
    """An observer of the events of a start."""

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
