"""Wakes us when memory gets short, so that somebody looks who has it: nothing polls.

The kernel tells when the use of a control group meets its limit (version 2) or comes near it (version 1, which asks for
the right to write into its files); of a machine without limits, when processes wait for memory.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ddplaunch.agent.control_groups import Cgroup
from ddplaunch.loop import Callback, EventLoop, Timer

LIMIT_FRACTIONS = (0.5, 0.75, 0.9)  # of a limit of version 1: we look each time that one of these is passed
MIN_QUIET_S = (
    1.0  # seconds after the first time in which nothing wakes us; twice as long after each that follows at once
)
MAX_QUIET_S = 15.0  # of these: caches of files fill any limit, and meet it all the time
_PRESSURE_TRIGGER = (
    b"some 200000 2000000"  # microseconds in which a process waits for memory, of 2 s: anybody may ask for these
)


class MemoryAlarm:
    """Calls ``on_low_memory`` each time, until it is closed."""

    def __init__(self, loop: EventLoop, cgroups: Sequence[Cgroup], on_low_memory: Callback, root: str = "") -> None:
        """Ask the kernel for it. OSError: too many files are open."""
        self._loop, self._short = loop, on_low_memory
        self._pause: Timer | None = None
        self._quiet, self._listens = MIN_QUIET_S, 0.0  # since when, on the monotonic clock
        self._ready = select.epoll()  # readable once one of what it watches has news
        self._taken: dict[int, Callable[[], object]] = {}  # by descriptor, how its news is taken
        limited = [each for each in cgroups if each.limit is not None]
        for each in limited:
            with suppress(OSError):
                if each.setting == "memory.max":
                    self._watch_file(f"{each.path}/memory.events")
                else:
                    self._watch_usage(each.path, [int(part * (each.limit or 0)) for part in LIMIT_FRACTIONS])
        if not limited:
            with suppress(OSError):
                self._watch_pressure(f"{root}/proc/pressure/memory")
        self._enable()

    def _open(self, path: str, how: int, take: Callable[[int], object]) -> int:
        file = os.open(path, how | os.O_CLOEXEC)
        self._taken[file] = partial(take, file)
        return file

    def _watch_file(self, path: str) -> None:
        """A change of what a file says is an urgent event, until it is read."""
        file = self._open(path, os.O_RDONLY, lambda file: os.pread(file, 4096, 0))
        self._taken[file]()
        self._ready.register(file, select.EPOLLPRI)

    def _watch_pressure(self, path: str) -> None:
        file = self._open(path, os.O_RDWR, bool)
        os.write(file, _PRESSURE_TRIGGER)
        self._ready.register(file, select.EPOLLPRI)

    def _watch_usage(self, folder: str, levels: Sequence[int]) -> None:
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._taken[event] = partial(os.read, event, 8)
        used = os.open(f"{folder}/memory.usage_in_bytes", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for level in levels:
                with open(f"{folder}/cgroup.event_control", "wb", 0) as control:
                    control.write(b"%d %d %d" % (event, used, level))
        finally:
            os.close(used)
        self._ready.register(event, select.EPOLLIN)

    def _enable(self) -> None:
        self._listens = time.monotonic()
        self._loop.watch_fd(self._ready.fileno(), self._on_ready)

    def _on_ready(self) -> None:
        self._short()
        for file, _ in self._ready.poll(0):
            with suppress(OSError):
                self._taken[file]()
        self._loop.unwatch_fd(self._ready.fileno())
        follows = time.monotonic() - self._listens < self._quiet
        self._quiet = min(2 * self._quiet, MAX_QUIET_S) if follows else MIN_QUIET_S
        self._pause = self._loop.call_later(self._quiet, self._enable)

    def close(self) -> None:
        if self._pause:
            self._pause.cancel()
        self._loop.unwatch_fd(self._ready.fileno())
        self._ready.close()
        for file in self._taken:
            os.close(file)
