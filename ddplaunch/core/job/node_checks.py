"""Node checks: before an attempt a feature may have every node check itself; a node that fails is left out."""

from __future__ import annotations

from ddplaunch.base.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.text import format_duration, join_names
from ddplaunch.core.failures import FailureReport, JobResult
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.messages import CheckRequest, NodeStartError

SLOW_NODE_NOTICE_S = 5.0  # after this, print which nodes have not replied
CHECK_TIMEOUT_S = 90.0
"""For a check that waits for nothing: Python may start slowly from a file server, and each step may take seconds."""


class NodeChecks:
    """The checks before each attempt."""

    def __init__(self, nodes: NodeTable, membership: Membership) -> None:
        self._config, self._nodes, self._membership = nodes.config, nodes, membership
        self._request: CheckRequest | None = None  # for the latest attempt
        self._unanswered: set[int] = set()  # nodes without a reply; empty if no round of checks is in progress
        self._expires_at = 0.0  # monotonic: when the round ends without the replies of nodes
        self.previous_failure: FailureReport | None = None  # of the attempt before, if a rank failed then

    @property
    def are_required(self) -> bool:
        """Whether nodes are checked before the latest attempt."""
        return self._request is not None

    def begin(self, request: CheckRequest | None) -> bool:
        """Ask all nodes to check themselves before an attempt; return False if there is no request for them."""
        self._request = request
        if request is None:
            return False
        self._unanswered = set(self._nodes)
        self._nodes.broadcast(request)
        self._set_deadline(request)
        return True

    def _set_deadline(self, request: CheckRequest) -> None:
        timeout_s = CHECK_TIMEOUT_S + request.wait_s
        self._expires_at = self._nodes.turn.now.mono + timeout_s
        self._nodes.turn.set_deadline("slow checks", SLOW_NODE_NOTICE_S if self._config.is_multi_node else timeout_s)

    def send_check(self, number: int) -> None:
        """Ask one node, as one that has just joined. A reply while an attempt runs does not count for the next one."""
        if self._request is None:
            return
        if self._unanswered:
            self._unanswered.add(number)
            self._set_deadline(self._request)
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

    def on_deadline(self) -> bool:
        """Print which nodes have not replied: the deadline "slow checks". Return whether none is waited for any more.

        A check has timeouts of its own, so a node that has not replied at the end has a bug, and gets its ranks.
        """
        names = join_names(self._nodes[number].name for number in sorted(self._unanswered & set(self._nodes)))
        left_s = self._expires_at - self._nodes.turn.now.mono
        if left_s > 0:
            self._nodes.turn.set_deadline("slow checks", left_s)
            self._nodes.broadcast_note(f"waiting for the check of {names}")
            return False
        waited = format_duration(CHECK_TIMEOUT_S + (self._request.wait_s if self._request else 0.0))
        what = names if self._config.is_multi_node else "this machine"
        self._nodes.broadcast_note(f"the check of {what} has not answered in {waited}: the ranks start without it")
        self._unanswered.clear()
        return True
