"""Runs a state machine (``core/machine.py``) whose commands need no reply before the next event."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop, WakeTimer
from ddplaunch.core.deadlines import Now
from ddplaunch.core.machine import Command, DeadlineDue, Machine, MachineEvent


class MachineDriver:
    """Passes events to a state machine, one after the other, and passes its commands on."""

    def __init__(self, loop: EventLoop, machine: Machine, execute: Callable[[Command], object]) -> None:
        self._machine, self._execute = machine, execute
        self._inbox: deque[MachineEvent] = deque()
        self._is_handling = False
        self._timer = WakeTimer(loop, lambda: self.post(DeadlineDue()))

    def post(self, event: MachineEvent) -> None:
        """Handle an event, and what follows from it; an event that comes meanwhile is handled after it.

        Raises what the machine raises: ProtocolError for an event that a peer cannot have caused.
        """
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._inbox:
                for command in self._machine.on(self._inbox.popleft(), Now(time.monotonic(), time.time())):
                    self._execute(command)
        finally:
            self._is_handling = False
        self._timer.set(self._machine.wake_at())
