"""Node checks: before an attempt a feature may have every node check itself; a node that fails is left out."""

from __future__ import annotations

from ddplaunch.base.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.text import join_names
from ddplaunch.core.failures import FailureReport, JobResult
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.messages import AttemptMessage, NodeStartError

SLOW_NODE_NOTICE_S = 5.0  # after this, print which nodes have not replied


class NodeChecks:
    """The checks before each attempt."""

    def __init__(self, nodes: NodeTable, membership: Membership) -> None:
        self._config, self._nodes, self._membership = nodes.config, nodes, membership
        self._request: AttemptMessage | None = None  # for the latest attempt
        self._unanswered: set[int] = set()  # nodes without a reply; empty if no round of checks is in progress
        self.previous_failure: FailureReport | None = None  # of the attempt before, if a rank failed then

    @property
    def are_required(self) -> bool:
        """Whether nodes are checked before the latest attempt."""
        return self._request is not None

    def begin(self, request: AttemptMessage | None) -> bool:
        """Ask all nodes to check themselves before an attempt; return False if there is no request for them."""
        self._request = request
        if request is None:
            return False
        self._unanswered = set(self._nodes)
        self._nodes.broadcast(request)
        if self._config.is_multi_node:
            self._nodes.turn.set_deadline("slow checks", SLOW_NODE_NOTICE_S)
        return True

    def send_check(self, number: int) -> None:
        """Ask one node, as one that has just joined. A reply while an attempt runs does not count for the next one."""
        if self._unanswered:
            self._unanswered.add(number)
        if self._request is not None:
            self._nodes.send(number, self._request)

    def on_check_passed(self, number: int, attempt: int) -> bool:
        """Called when a node has passed its check; return whether all have."""
        return self._request is not None and attempt == self._request.attempt and self.on_node_gone(number)

    def on_node_gone(self, number: int) -> bool:
        """Called when a node needs no more waiting for: it passed, was left out or is lost. Return whether all have."""
        was_last = self._unanswered == {number}
        self._unanswered.discard(number)
        return was_last

    def on_check_failed(self, node: JoinedNode, error: NodeStartError, *, first: bool) -> JobResult | str:
        """Called when a node's check failed: return the job's result, or how it goes on without the node.

        ``first``: before the first attempt.
        """
        if self._membership.can_spare(node):
            return f"{node.name} is left out: {error.message}"
        text = f"{node.name}: {error.message}" if self._config.is_multi_node else error.message
        if node.node_rank and self._config.is_elastic:
            left = self._membership.usable_count - self._membership.is_usable(node)
            text += f"; without it {left} of at least {self._config.min_nodes} nodes are left"
        if (failure := self.previous_failure) is not None:
            return JobResult(failure.first.shell_exit_code, failure, remark=f"no restart: {text}")
        if first:
            return JobResult(EXIT_USAGE, usage_error=(text, error.hint))
        return JobResult(EXIT_UNAVAILABLE, remark=f"no restart: {text}")

    def name_slow_nodes(self) -> None:
        """Print which nodes have not replied: the deadline "slow checks"."""
        awaited = [self._nodes[number].name for number in sorted(self._unanswered & set(self._nodes))]
        if awaited:
            self._nodes.broadcast_note(f"waiting for the check of {join_names(awaited)}")
