"""Isolates optional parts, like the sides of features: an exception in one disables it, and the job continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar

from ddplaunch.base.errors import escape_control_chars, format_trace
from ddplaunch.base.event_loop import Callback, EventLoop, Timer
from ddplaunch.base.reinstalled import REINSTALLED_TEXT, was_reinstalled

R = TypeVar("R")


class Isolation:
    """Calls functions of one optional feature; after the first exception, which is reported, it stops calling them."""

    def __init__(self, feature: str, report: Callable[[str], object]) -> None:
        """``report`` gets the message on an exception."""
        self._feature, self._report = feature, report
        self.on_error: Callback | None = None  # set by the feature: called after an exception, to clean up
        self.failed = False

    def call(self, function: Callable[..., R], *arguments: object) -> R | None:
        """Call a function of the feature and return its result; None if this or an earlier call has raised."""
        if self.failed:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self.failed = True
            with suppress(Exception):
                self._report(describe_bug(self._feature, error))
                if self.on_error is not None:
                    self.on_error()
            return None

    def guard(self, callback: Callable[..., R]) -> Callable[..., R | None]:
        """Wrap a callback of the feature; the wrapper returns None once a function of the feature has raised."""
        return partial(self.call, callback)


class IsolatedLoop(Isolation, EventLoop):
    """An event loop for one optional feature.

    The first exception in one of its callbacks is reported with its traceback; then no callback is called any more.
    """

    def __init__(self, loop: EventLoop, feature: str, report: Callable[[str], object]) -> None:
        super().__init__(feature, report)
        self._loop = loop

    def watch_fd(self, fd: int, callback: Callback, *, write: bool = False) -> None:
        guarded = self.guard(callback)

        def on_ready() -> None:
            guarded()
            if self.failed:
                self._loop.unwatch_fd(fd)

        self._loop.watch_fd(fd, on_ready, write=write)

    def unwatch_fd(self, fd: int, *, write: bool | None = None) -> None:
        self._loop.unwatch_fd(fd, write=write)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        return self._loop.call_later(seconds, self.guard(callback))

    def call_soon(self, callback: Callback) -> None:
        self._loop.call_soon(self.guard(callback))

    def add_signal_handlers(
        self, numbers: Iterable[int], callback: Callable[[int], None], *, even_if_ignored: Iterable[int] = ()
    ) -> None:
        self._loop.add_signal_handlers(numbers, self.guard(callback), even_if_ignored=even_if_ignored)

    def run_once(self) -> None:
        self._loop.run_once()


def raise_errors_in_loop(
    call_soon: Callable[[Callback], object], function: Callable[[R], object]
) -> Callable[[R], None]:
    """Wrap a function of the core that features call: its exception is raised by the loop, so that it ends the job.

    Otherwise the exception would only disable the feature, and the job would wait for what the core has not done.
    """

    def call_and_post_error(argument: R) -> None:
        try:
            function(argument)
        except Exception as error:
            call_soon(partial(_raise, error))

    return call_and_post_error


def _raise(error: Exception) -> NoReturn:
    raise error


def describe_bug(feature: str, error: Exception) -> str:
    """Describe the exception that disabled a feature, with its traceback."""
    if was_reinstalled():
        return f"{REINSTALLED_TEXT}: {feature} is left out, the job continues ({type(error).__name__})"
    what = f"bug in ddplaunch: {feature} failed and is left out, the job continues"
    return f"{what}:\n{escape_control_chars(format_trace(error))}"
