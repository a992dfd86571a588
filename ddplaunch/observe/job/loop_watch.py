"""Finds, on node 0, ranks that loop at one place while others wait for them, and reports each once."""

from __future__ import annotations

from functools import partial

from ddplaunch.base.stack_frames import Frame
from ddplaunch.core.feature import JobContext
from ddplaunch.core.messages import NoteMessage
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.diagnosis.loops import (
    MIN_SIGHTINGS,
    BusyRank,
    describe_loop,
    find_busy_ranks,
    find_loop,
)
from ddplaunch.observe.diagnosis.slow_ranks import typical_collective_gap_s
from ddplaunch.observe.job.awaited_rank import format_hosts

LOOP_SIGHTING = "loop sighting"
"""The deadline at which the ranks are inspected again while a busy rank is watched."""

LOOP_REPORT_S = 300.0  # a busy rank that is at one place for longer is reported
SIGHTING_INTERVAL_S = 60.0
_UNUSUAL_FACTOR = 10.0  # … but only if longer than this times the typical gap between collectives
_REPEAT_FACTOR = 3.0  # the next time at the same place it must be there for this times as long
_MAX_SIGHTINGS = 30


class _RankSightings:
    """A busy rank, and where it was seen since ranks last made progress."""

    def __init__(self, busy: BusyRank, now: float) -> None:
        self.busy, self.since = busy, now
        self.stacks: list[tuple[Frame, ...]] = [busy.user_frames]
        self.place, self.was_reported = "", False
        self.report_after_s = LOOP_REPORT_S  # longer in a job with long gaps between collectives

    def add(self, busy: BusyRank) -> bool:
        """Add the place at which an inspection found the rank; return whether all sightings are at one place."""
        self.stacks = [*self.stacks[-_MAX_SIGHTINGS:], busy.user_frames]
        self.place = find_loop(self.stacks) if busy.progress_key == self.busy.progress_key else ""
        self.busy = busy
        return bool(self.place)


class BusyRankWatch:
    """Collects where in the code busy ranks are in each inspection of one attempt."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._watched: dict[int, _RankSightings] = {}
        self._report_after_s: dict[str, float] = {}  # by place

    def begin(self) -> None:
        """Called when an attempt starts: discard the sightings of the previous one."""
        self._watched.clear()
        self._report_after_s.clear()
        self._context.cancel_deadlines(LOOP_SIGHTING)

    def observe(self, inspection: Inspection) -> None:
        """Called with each inspection of a job in which ranks wait for others that are not idle."""
        now = self._context.now.mono
        if inspection.silent or len(inspection.ranks) < inspection.world_size:  # a node was late
            return self._context.set_deadline(LOOP_SIGHTING, SIGHTING_INTERVAL_S) if self._watched else None
        found = {busy.rank.rank: busy for busy in find_busy_ranks(inspection)}
        for rank in self._watched.keys() - found:
            del self._watched[rank]
        for rank, busy in found.items():
            if not (rank in self._watched and self._watched[rank].add(busy)):
                self._watched[rank] = _RankSightings(busy, now)
        if not self._watched:
            return self._context.cancel_deadlines(LOOP_SIGHTING)
        longest = max(now - each.since for each in self._watched.values())
        self._context.set_deadline(LOOP_SIGHTING, max(SIGHTING_INTERVAL_S, longest / 5))
        for each in self._watched.values():
            after = max(each.report_after_s, self._report_after_s.get(each.place, 0.0))
            if each.place and not each.was_reported and len(each.stacks) >= MIN_SIGHTINGS and now - each.since >= after:
                self._context.gather("inspect", Detail.LATENESS, partial(self._report_unusual_loop, each))
        return None

    def _report_unusual_loop(self, watched: _RankSightings, inspection: Inspection) -> None:
        gap = typical_collective_gap_s(each for rank in inspection.ranks for each in rank.arrivals)
        number, seconds = watched.busy.rank.rank, self._context.now.mono - watched.since
        watched.report_after_s = _UNUSUAL_FACTOR * gap
        if self._watched.get(number) is not watched or seconds < watched.report_after_s:
            return
        watched.was_reported = True
        self._report_after_s[watched.place] = _REPEAT_FACTOR * seconds
        hosts = format_hosts(self._context, inspection, [number])
        text = f"{describe_loop(watched.busy, watched.place, seconds)}{hosts}"
        self._context.send_to_all(NoteMessage(f"{text}; for details: ddplaunch stacks {self._context.run_id}"))
