"""Tracks the time breakdown of a running job in its launcher, and defines the request that returns it."""

from __future__ import annotations

import time

from ddplaunch.base.types import TaggedMessage, Timestamp
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.core.events import Event
from ddplaunch.core.feature import NodeSide
from ddplaunch.observe.history.time_breakdown import TimeAccounting, TimeBreakdown


class TimeTracker(NodeSide):
    """Applies each event to the time breakdown of this run."""

    def __init__(self, nnodes: int) -> None:
        self._began = time.time()
        self._accounting = TimeAccounting(self._began, nnodes)

    def observe(self, event: Event) -> None:
        self._accounting.on_event(event, time.time())

    def breakdown(self) -> BreakdownReply:
        """Return the breakdown of the time until now."""
        return BreakdownReply(self._accounting.breakdown(time.time()), self._accounting.stall_periods)


class BreakdownReply(TaggedMessage, frozen=True):
    """The time breakdown of a run until now."""

    spent: TimeBreakdown
    stalls: tuple[tuple[Timestamp, Timestamp], ...] = ()  # when the ranks were stalled


class BreakdownRequest(Request[BreakdownReply], frozen=True):
    """Request for the time breakdown of a run."""

    answers = (BreakdownReply,)

    def handle(self, context: RequestContext) -> None:
        tracker = context.job.find_side(TimeTracker)
        context.send(tracker.breakdown() if tracker else BreakdownReply(TimeBreakdown()))
        context.finish()
