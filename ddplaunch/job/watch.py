"""The observer that keeps the status: it only notes the events, and folds them when it is asked."""

from __future__ import annotations

import os
import time

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import replace
from ddplaunch.output.events import Event
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from ddplaunch.job.effective import TimeAccounting
    from ddplaunch.job.status import Status

MAX_PENDING_EVENTS = 4096  # events that are kept unfolded


class StatusTracker:
    """What has happened to this node's share of a job."""

    def __init__(self, plan: Plan) -> None:
        """``plan`` is this node's, before it has joined the others."""
        self._plan = plan
        self._began = time.time()
        self._status: Status | None = None
        self._account: TimeAccounting | None = None
        self._news: list[tuple[Event, float]] = []

    def observe(self, event: Event) -> None:
        self._news.append((event, time.time()))
        if len(self._news) > MAX_PENDING_EVENTS:
            self.status()

    def status(self) -> Status:
        from ddplaunch.job.effective import TimeAccounting
        from ddplaunch.job.status import Status

        status = self._status or Status.of(self._plan, os.getpid(), self._began)
        account = self._account = self._account or TimeAccounting(self._began, self._plan.nnodes)
        for event, moment in self._news:
            status = status.apply(event, moment)
            account.on_event(event, moment)
        self._news.clear()
        self._status = replace(status, spent=account.breakdown(time.time()))
        return self._status
