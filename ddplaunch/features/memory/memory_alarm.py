"""Memory alarm: calls back when memory gets short, so that the ranks can be sampled; without polling.

The kernel notifies when a control group reaches its limit (version 2) or comes near it (version 1, which requires write
permission); on a machine without limits, when processes wait for memory (pressure stall information).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ddplaunch.base.event_loop import Callback, EventLoop, Timer
from ddplaunch.system.devices.cgroups import Cgroup

LIMIT_FRACTIONS = (0.5, 0.75, 0.9)  # of a version 1 limit: passing one of these is an alarm
MIN_QUIET_S = 1.0  # alarms are off for this time after an alarm; it doubles for each alarm that follows at once
MAX_QUIET_S = 15.0  # page caches fill any limit, and reach it all the time
_PRESSURE_TRIGGER = b"some 200000 2000000"  # µs in 2 s in which a process waits for memory; needs no privileges


class MemoryAlarm:
    """Alarm that calls ``on_low_memory`` each time memory gets short, until the alarm is closed."""

    def __init__(self, loop: EventLoop, cgroups: Sequence[Cgroup], on_low_memory: Callback, root: str = "") -> None:
        """Register with the kernel. Raises OSError if too many files are open."""
        self._loop, self._on_low_memory = loop, on_low_memory
        self._pause: Timer | None = None
        self._quiet, self._enabled_at = MIN_QUIET_S, 0.0  # enabled since, on the monotonic clock
        self._ready = select.epoll()  # readable once one of its descriptors has an event
        self._consumers: dict[int, Callable[[], object]] = {}  # by descriptor: how to consume its event
        limited = [each for each in cgroups if each.limit is not None]
        for cgroup in limited:
            with suppress(OSError):
                if cgroup.setting == "memory.max":
                    self._watch_events_file(f"{cgroup.path}/memory.events")
                else:
                    self._watch_usage(cgroup.path, [int(part * (cgroup.limit or 0)) for part in LIMIT_FRACTIONS])
        if not limited:
            with suppress(OSError):
                self._watch_pressure(f"{root}/proc/pressure/memory")
        self._enable()

    def _open(self, path: str, how: int, consume: Callable[[int], object]) -> int:
        file = os.open(path, how | os.O_CLOEXEC)
        self._consumers[file] = partial(consume, file)
        return file

    def _watch_events_file(self, path: str) -> None:
        """Watch the file memory.events: after each change it has an EPOLLPRI event until it is read."""
        file = self._open(path, os.O_RDONLY, lambda file: os.pread(file, 4096, 0))
        self._consumers[file]()
        self._ready.register(file, select.EPOLLPRI)

    def _watch_pressure(self, path: str) -> None:
        file = self._open(path, os.O_RDWR, bool)
        os.write(file, _PRESSURE_TRIGGER)
        self._ready.register(file, select.EPOLLPRI)

    def _watch_usage(self, folder: str, levels: Sequence[int]) -> None:
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._consumers[event] = partial(os.read, event, 8)
        used = os.open(f"{folder}/memory.usage_in_bytes", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for level in levels:
                with open(f"{folder}/cgroup.event_control", "wb", 0) as control:
                    control.write(b"%d %d %d" % (event, used, level))
        finally:
            os.close(used)
        self._ready.register(event, select.EPOLLIN)

    def _enable(self) -> None:
        self._enabled_at = time.monotonic()
        self._loop.watch_fd(self._ready.fileno(), self._on_ready)

    def _on_ready(self) -> None:
        self._on_low_memory()
        for file, _ in self._ready.poll(0):
            with suppress(OSError):
                self._consumers[file]()
        self._loop.unwatch_fd(self._ready.fileno())
        follows = time.monotonic() - self._enabled_at < self._quiet
        self._quiet = min(2 * self._quiet, MAX_QUIET_S) if follows else MIN_QUIET_S
        self._pause = self._loop.call_later(self._quiet, self._enable)

    def close(self) -> None:
        if self._pause:
            self._pause.cancel()
        self._loop.unwatch_fd(self._ready.fileno())
        self._ready.close()
        for file in self._consumers:
            os.close(file)
