"""Selects which joined nodes get ranks, in which order, and counts how often that has changed.

Without spares, all nodes get ranks. With spares, as many nodes as the job needs get ranks, and each of them keeps its
position from attempt to attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ddplaunch.base.text import join_names
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.job.job_attempt import JobPhase, NodeFailure
from ddplaunch.core.job.node_order import NodePlace, describe_domains, order_nodes
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.machine import Command
from ddplaunch.core.options import Elastic, Nodes

MAX_HOST_FAILURES = 2  # after which a host gets no ranks


class Membership:
    """The nodes with ranks, from attempt to attempt."""

    def __init__(self, nodes: NodeTable) -> None:
        self._config, self._nodes = nodes.config, nodes
        self._options = nodes.config.options
        self.changes = 0  # counted for --max-membership-changes
        self._active: list[JoinedNode] = []  # the nodes of the latest attempt, in order
        self._to_replace: set[int] = set()  # node ranks of nodes that failed: spares replace them, if any
        self._failures = Counter[str]()  # by host

    def is_usable(self, node: JoinedNode) -> bool:
        """Whether a node may have ranks."""
        return not node.node_rank or (self._failures[node.host] < MAX_HOST_FAILURES and not node.leaving)

    @property
    def usable_count(self) -> int:
        """How many nodes may have ranks."""
        return sum(map(self.is_usable, self._nodes.values()))

    @property
    def shortage(self) -> str | None:
        """Why there are too few usable nodes for the job; None if there are enough."""
        return self.shortage_without(None)

    def shortage_without(self, node: JoinedNode | None) -> str | None:
        """Return why there are too few usable nodes for the job without ``node``; None if there are enough."""
        usable, least = self.usable_count - (node is not None and self.is_usable(node)), self._config.min_nodes
        if usable < least:
            return f"{usable} of at least {least} nodes are left"
        few = self.find_segment_shortage(node)
        return few[0] if few else None

    def find_segment_shortage(self, without: JoinedNode | None = None) -> tuple[str, str] | None:
        """Return why --segment cannot be kept with the nodes except ``without``, and a hint; None if it can."""
        segment, least = self._segment_size, self._config.min_nodes
        if segment < 2 or (found := len(self.select_nodes(without))) >= least:
            return None
        what = f"--segment {segment}: {found} of {least} nodes are in whole groups of {segment} in one domain"
        domains = describe_domains(_places_of(self._usable_nodes(without).values()))
        return what, f"domains: {domains}; node 0 must be in such a group"

    @property
    def has_room(self) -> bool:
        """Whether one more node could have had ranks in this attempt."""
        if self._segment_size > 1:
            return len(self.select_nodes()) > len(self._active)
        return len(self._active) < self._config.max_active_nodes

    @property
    def next_attempt_note(self) -> str:
        """The note that names the nodes of the next attempt."""
        nodes = self.select_nodes()
        return f"going on with {len(nodes)} node{'s' * (len(nodes) > 1)}: {join_names(node.name for node in nodes)}"

    def late_join_note(self, node: JoinedNode) -> str:
        """The note on a node that joins while ranks run."""
        if not self.is_usable(node):
            return f"{node.name} has joined but is excluded: it failed {self._failures[node.host]} times"
        if self._options[Elastic].spares and not self.has_room:
            return f"{node.name} has joined as a spare"
        return f"{node.name} has joined; it takes part when the ranks start next"

    def can_continue_without(self, node: JoinedNode) -> bool:
        """Whether the job can go on without a node."""
        return bool(node.node_rank) and self.shortage_without(node) is None

    def can_leave(self, node: JoinedNode, phase: JobPhase) -> bool:
        """Whether a SIGTERM on this node (eviction, scale-down) removes only the node and does not end the job."""
        elastic = self._config.is_elastic and bool(node.node_rank)
        return elastic and (phase is JobPhase.JOINING or self.can_continue_without(node))

    def on_node_failed(self, node: JoinedNode) -> list[Command]:
        """Called when a node was lost or the first cause of a failure was on it: a spare, if there is one, replaces it.

        Node 0 is never replaced: all others are connected to it.
        """
        if not self._options[Elastic].spares or not node.node_rank:
            return []
        self._to_replace.add(node.node_rank)
        self._failures[node.host] += 1
        if self.is_usable(node):
            return []
        return self._nodes.note_to_all(
            f"{node.name} failed {self._failures[node.host]} times and is excluded from now on"
        )

    def record_failure(self, report: FailureReport | None, launcher_failure: NodeFailure | None) -> list[Command]:
        """Count a failure of the node on which an attempt failed, unless the first failure is a secondary one."""
        commands: list[Command] = []
        for node in () if report and report.first.is_secondary else self._active:
            if report:
                failed_here = report.first.rank in node.ranks
            else:
                failed_here = launcher_failure is not None and launcher_failure.node == node.node_rank
            if failed_here and node.node_rank in self._nodes:
                commands += self.on_node_failed(node)
        return commands

    def count_change(self, why: str) -> str | None:
        """Count a membership change; return why the job cannot go on (``why`` and the limit), None if it can."""
        if few := self.shortage:
            return f"{why}; {few}" if self._config.is_elastic else why
        if self.changes >= (most := self._options[Elastic].max_membership_changes):
            return f"{why}; limit reached (--max-membership-changes {most})"
        self.changes += 1
        return None

    def count_loss(self, node: JoinedNode) -> None:
        """Count the loss of a node between attempts, unless it was a spare: the ranks stay the same without it."""
        if not self._options[Elastic].spares or node in self._active:
            self.changes += 1

    def select_nodes(self, without: JoinedNode | None = None) -> list[JoinedNode]:
        """Return the nodes that get ranks in the next attempt, in the order of their ranks; all but ``without``."""
        usable = self._usable_nodes(without)
        if self._are_ordered_by_domain:
            places, before = _places_of(usable.values()), _places_of(self._active)
            count = self._config.max_active_nodes
            return [
                usable[number] for number in order_nodes(places, before, self._to_replace, count, self._segment_size)
            ]
        if not self._options[Elastic].spares:
            return [*usable.values()]
        stay = {node.node_rank for node in self._active if node.node_rank in usable} - self._to_replace
        # Nodes that have just failed come last.
        others = sorted((number for number in usable if number not in stay), key=self._to_replace.__contains__)
        order = []
        for node in self._active:
            if node.node_rank in stay:
                order.append(node.node_rank)
            elif others:
                order.append(others.pop(0))
        return [usable[number] for number in [*order, *others][: self._config.max_active_nodes]]

    def _usable_nodes(self, without: JoinedNode | None = None) -> dict[int, JoinedNode]:
        """Return the nodes that may have ranks, by node rank; all but ``without``."""
        may_have_ranks, nodes = self._config.may_have_ranks, self._nodes.sorted_nodes
        usable = [node for node in nodes if self.is_usable(node) and may_have_ranks(node.node_rank)]
        return {node.node_rank: node for node in usable if node is not without}

    @property
    def _segment_size(self) -> int:
        return self._options[Nodes].segment or 1

    @property
    def _are_ordered_by_domain(self) -> bool:
        """Whether the order of the nodes follows their domains: if not all of them have a --node-rank, for example."""
        options, nodes = self._options, self._nodes.values()
        if self._segment_size > 1:
            return True
        if options[Nodes].node_order == "topology":
            return any(node.hello.domain for node in nodes)
        are_given = all(node.hello.has_node_rank for node in nodes if node.node_rank)
        may_change = self._config.is_elastic or bool(options[Elastic].spares) or not are_given
        return may_change and any(node.hello.domain for node in nodes)

    def commit_nodes(self) -> tuple[list[JoinedNode], list[Command]]:
        """Return the nodes of the attempt that starts now, and commands that print which spares replace which nodes."""
        before, self._active = self._active, self.select_nodes()
        self._to_replace.clear()
        notes = []
        if self._are_ordered_by_domain and not before:
            notes.append(f"nodes with ranks by domain: {describe_domains(_places_of(self._active))}")
        if self._options[Elastic].spares:
            notes += self._describe_changes([node.name for node in before], [node.name for node in self._active])
        return self._active, [command for note in notes for command in self._nodes.note_to_all(note)]

    def _describe_changes(self, before: list[str], names: list[str]) -> Iterator[str]:
        """Yield which node replaces which, and at the first start which are spares."""
        former, running = set(before), set(names)
        for new, old in zip(names, before, strict=False):
            if new not in former:
                yield f"{new} takes the place of {old}"
        waiting = [node.name for node in self._nodes.sorted_nodes if node.name not in running]
        if waiting and not before:
            yield f"waiting as spare{'s' * (len(waiting) > 1)}: {join_names(waiting)}"


def _places_of(nodes: Iterable[JoinedNode]) -> list[NodePlace]:
    """Return the node rank and the domain of each node."""
    return [NodePlace(node.node_rank, node.hello.domain) for node in nodes]
