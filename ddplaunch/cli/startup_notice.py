"""Shows what the launcher waits for if the start of a job takes long."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.base.text import format_count
from ddplaunch.core.events import (
    AttemptPlanned,
    AttemptSwept,
    Event,
    JobEnded,
    RankStarted,
    SignalReceived,
    ZygoteReady,
)
from ddplaunch.core.output.screen import Screen

STARTUP_NOTICE_DELAY_S = 5.0  # a shorter start is silent


class StartupNotice:
    """Observer that shows what a slow start is waiting for, until every rank has a process."""

    def __init__(self, loop: EventLoop, screen: Screen, modules: Sequence[str]) -> None:
        """``modules``: names of the modules that the zygote imports for all ranks."""
        self._loop, self._screen, self._modules = loop, screen, modules
        self._activity = ""  # "importing torch"
        self._pending_ranks = 0  # without a process
        self._timer: Timer | None = None
        self._is_shown = False

    def observe(self, event: Event) -> None:
        match event:
            case AttemptPlanned(plan=plan):
                self._pending_ranks = len(plan.local_ranks)
                self._activity = f"importing {_name_modules(self._modules)}" if self._modules else "waiting for Python"
                self._restart_timer()
            case ZygoteReady():
                self._activity = "waiting for their processes"
                if self._timer is not None:
                    self._restart_timer()
            case RankStarted():
                self._pending_ranks -= 1
                if not self._pending_ranks:
                    self._end()
            case SignalReceived() | AttemptSwept() | JobEnded():
                self._end()

    def _restart_timer(self) -> None:
        self._end()
        self._timer = self._loop.call_later(STARTUP_NOTICE_DELAY_S, self._show_notice)

    def _show_notice(self) -> None:
        self._is_shown = True
        text = f"starting {format_count(self._pending_ranks, 'rank')}: {self._activity}"
        self._screen.show_footer(text, of_job=True, waited=STARTUP_NOTICE_DELAY_S)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_shown:
            self._is_shown = False
            self._screen.show_footer("", of_job=True)


def _name_modules(modules: Sequence[str]) -> str:
    """Name one or two modules, or the first of more: "torch and 4 more"."""
    first, *others = modules
    return f"{first} and {others[0] if len(others) == 1 else f'{len(others)} more'}" if others else first
