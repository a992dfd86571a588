"""The observer that tracks the job's status: it buffers events, and applies them when the status is read."""

from __future__ import annotations

import os
import time

from msgspec.structs import replace

from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.time_breakdown import TimeAccounting
from ddplaunch.core.events import Event
from ddplaunch.system.plan.plan import Plan

MAX_PENDING_EVENTS = 4096  # buffered before they are applied


class StatusTracker:
    """Tracks the status and the time breakdown of this node's part of a job."""

    def __init__(self, plan: Plan) -> None:
        """``plan`` is this node's, before it has joined the others."""
        self._plan = plan
        self._began = time.time()
        self._status: Status | None = None
        self._accounting: TimeAccounting | None = None
        self._pending: list[tuple[Event, float]] = []

    def observe(self, event: Event) -> None:
        self._pending.append((event, time.time()))
        if len(self._pending) > MAX_PENDING_EVENTS:
            self.status()

    def status(self) -> Status:
        status = self._status or Status.from_plan(self._plan, os.getpid(), self._began)
        accounting = self._accounting = self._accounting or TimeAccounting(self._began, self._plan.nnodes)
        for event, moment in self._pending:
            status = status.apply(event, moment)
            accounting.on_event(event, moment)
        self._pending.clear()
        self._status = replace(status, spent=accounting.breakdown(time.time()))
        return self._status
