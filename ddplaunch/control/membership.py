"""Which of the nodes that have joined get ranks, and how often that may change.

All do; with spares as many as the job needs, and these keep their places from attempt to attempt.
"""

from __future__ import annotations

from collections import Counter

from ddplaunch.control.attempt import JobPhase, NodeFailure
from ddplaunch.control.failure import FailureReport
from ddplaunch.control.seat import JoinedNode, NodeTable
from ddplaunch.words import join_names

MAX_HOST_FAILURES = 2  # failures of a host after which it gets no ranks any more


class Membership:
    """Those that have ranks in one attempt after the other."""

    def __init__(self, seats: NodeTable) -> None:
        self._rules, self._seats = seats.rules, seats
        self.changes = 0  # of those that ``--max-membership-changes`` allows
        self._places: list[JoinedNode] = []  # the nodes of the latest attempt, in order
        self._resting: set[int] = set()  # those that are to give their place to others, if there are any
        self._failures = Counter[str]()  # of each host

    def is_usable(self, seat: JoinedNode) -> bool:
        """Whether a node may have ranks."""
        return not seat.node_rank or (self._failures[seat.host] < MAX_HOST_FAILURES and not seat.leaving)

    @property
    def usable_count(self) -> int:
        """How many nodes may have ranks."""
        return sum(map(self.is_usable, self._seats.values()))

    @property
    def shortage(self) -> str | None:
        """What people read where these are not enough for the job; None where they are."""
        able, least = self.usable_count, self._rules.min_nodes
        return f"{able} of at least {least} nodes are left" if able < least else None

    @property
    def has_room(self) -> bool:
        """Whether one more node could have had ranks in this attempt."""
        return len(self._places) < self._rules.max_active_nodes

    @property
    def describe_next_attempt(self) -> str:
        """Whom the next attempt starts with."""
        line = self.select_nodes()
        return f"going on with {len(line)} node{'s' * (len(line) > 1)}: {join_names(seat.name for seat in line)}"

    def describe_late_join(self, seat: JoinedNode) -> str:
        """What people read of a node that joins while others run."""
        if not self.is_usable(seat):
            return f"{seat.name} has joined, but gets no ranks: it has failed {self._failures[seat.host]} times"
        if not self.has_room:
            return f"{seat.name} has joined as a spare"
        return f"{seat.name} has joined; it takes part when the ranks start next"

    def can_spare(self, seat: JoinedNode) -> bool:
        """Whether the job can go on without a node."""
        return bool(seat.node_rank) and self.usable_count - self.is_usable(seat) >= self._rules.min_nodes

    def can_leave(self, seat: JoinedNode, stage: JobPhase) -> bool:
        """Whether a SIGTERM there, as eviction and scale-down begin, takes away that node and does not end the job."""
        elastic = self._rules.is_elastic and bool(seat.node_rank)
        return elastic and (stage is JobPhase.JOINING or self.can_spare(seat))

    def on_node_failed(self, seat: JoinedNode) -> None:
        """A node was lost, or an attempt began to fail there: where there are spares, one takes its place.

        Node 0 keeps its place: all the others are connected to it.
        """
        if not self._rules.spares or not seat.node_rank:
            return
        self._resting.add(seat.node_rank)
        self._failures[seat.host] += 1
        if not self.is_usable(seat):
            self._seats.broadcast_note(
                f"{seat.name} has failed {self._failures[seat.host]} times: it gets no ranks any more"
            )

    def record_failure(self, report: FailureReport | None, broken: NodeFailure | None) -> str | None:
        """An attempt has failed: its node is known, unless ranks only saw what had happened to others.

        Return what ``shortage`` says then.
        """
        for seat in () if report and report.first.is_secondary else self._places:
            here = report.first.rank in seat.ranks if report else broken and broken.node == seat.node_rank
            if here and seat.node_rank in self._seats:
                self.on_node_failed(seat)
        return self.shortage

    def count_change(self, why: str) -> str | None:
        """Count one more; return None, or why the job cannot go on where it cannot: ``why``, and what is used up."""
        if few := self.shortage:
            return f"{why}; {few}" if self._rules.is_elastic else why
        if self.changes >= self._rules.max_membership_changes:
            return f"{why}; all {self._rules.max_membership_changes} --max-membership-changes were used"
        self.changes += 1
        return None

    def select_nodes(self) -> list[JoinedNode]:
        """The nodes that are to have ranks in the next attempt, in order."""
        able = {seat.node_rank: seat for seat in self._seats.sorted_nodes if self.is_usable(seat)}
        if not self._rules.spares:
            return [*able.values()]
        stay = {seat.node_rank for seat in self._places if seat.node_rank in able} - self._resting
        # Those that have failed just now come last.
        others = sorted((number for number in able if number not in stay), key=self._resting.__contains__)
        line = []
        for seat in self._places:
            if seat.node_rank in stay:
                line.append(seat.node_rank)
            elif others:
                line.append(others.pop(0))
        return [able[number] for number in [*line, *others][: self._rules.max_active_nodes]]

    def commit_nodes(self) -> list[JoinedNode]:
        """The nodes that have ranks from now on; people hear what is new in that."""
        before, self._places = self._places, self.select_nodes()
        self._resting.clear()
        if self._rules.spares:
            self._report_changes([seat.name for seat in before], [seat.name for seat in self._places])
        return self._places

    def _report_changes(self, before: list[str], names: list[str]) -> None:
        """Say who has come for whom, and at the first start who waits."""
        former, running = set(before), set(names)
        for new, old in zip(names, before, strict=False):
            if new not in former:
                self._seats.broadcast_note(f"{new} takes the place of {old}")
        waiting = [seat.name for seat in self._seats.sorted_nodes if seat.name not in running]
        if waiting and not before:
            self._seats.broadcast_note(f"waiting as spare{'s' * (len(waiting) > 1)}: {join_names(waiting)}")
