"""Node checks: before an attempt every node checks itself if a feature wants it; collects the replies and decides who
takes part.
"""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.base.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.text import join_names
from ddplaunch.core.failures import FailureReport, JobResult
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.messages import AttemptMessage, EndJob, NodeStartError

SLOW_NODE_NOTICE_S = 5.0  # after this, print which nodes have not replied


class NodeChecks:
    """The checks before each attempt."""

    def __init__(
        self,
        nodes: NodeTable,
        membership: Membership,
        make_request: Callable[[int], AttemptMessage | None],
        call_later: Callable[[float, Callable[[], None]], None],
        start: Callable[[], None],
        end: Callable[[JobResult], None],
    ) -> None:
        """``make_request`` returns what to send to each node before an attempt; None: nodes need no check.

        ``start`` is called when all nodes have passed, ``end`` if the job cannot go on.

        The timers of ``call_later`` are cancelled when an attempt starts or ends.
        """
        self._config, self._nodes, self._membership = nodes.config, nodes, membership
        self._make_request, self._call_later, self._start, self._end = make_request, call_later, start, end
        self._request: AttemptMessage | None = None  # for the latest attempt
        self._unanswered: set[int] = set()  # nodes without a reply; empty if no round of checks is in progress

    @property
    def are_required(self) -> bool:
        """Whether nodes are checked before the latest attempt."""
        return self._request is not None

    def prepare(self, attempt: int) -> bool:
        """Return whether nodes are checked before this attempt; then ``begin`` follows."""
        self._request = self._make_request(attempt)
        return self.are_required

    def begin(self) -> None:
        """Ask all nodes to check themselves."""
        self._unanswered = set(self._nodes)
        for number in list(self._nodes):
            self.send_check(number)
        if self._config.is_multi_node:
            self._call_later(SLOW_NODE_NOTICE_S, self._name_slow_nodes)

    def send_check(self, number: int) -> None:
        """Ask one node, as one that has just joined. A reply while an attempt runs does not count for the next one."""
        if self._unanswered:
            self._unanswered.add(number)
        if self._request is not None:
            self._nodes.send(number, self._request)

    def on_check_passed(self, number: int, attempt: int) -> None:
        """Called when a node has passed its check."""
        if self._request is not None and attempt == self._request.attempt:
            self.on_node_gone(number)

    def on_node_gone(self, number: int) -> None:
        """Called when a node needs no more waiting for: it passed, was left out or is lost."""
        if number in self._unanswered:
            self._unanswered.discard(number)
            if not self._unanswered:
                self._start()

    def on_check_failed(
        self, node: JoinedNode, error: NodeStartError, previous_failure: FailureReport | None, *, first: bool
    ) -> None:
        """Called when a node's check failed: go on without it, or end the job.

        ``previous_failure``: how the previous attempt failed, if it did; ``first``: whether this is the first attempt.
        """
        if self._membership.can_spare(node):
            text = f"{node.name} is left out: {error.message}"
            del self._nodes[node.node_rank]
            self._nodes.broadcast_note(text)
            self._nodes.send(node.node_rank, EndJob(JobResult(EXIT_USAGE, usage_error=(text, error.hint))))
            return self.on_node_gone(node.node_rank)
        text = f"{node.name}: {error.message}" if self._config.is_multi_node else error.message
        if node.node_rank and self._config.is_elastic:
            left = self._membership.usable_count - self._membership.is_usable(node)
            text += f"; without it {left} of at least {self._config.min_nodes} nodes are left"
        if previous_failure is not None:
            self._end(JobResult(previous_failure.first.shell_exit_code, previous_failure, remark=f"no restart: {text}"))
        elif first:
            self._end(JobResult(EXIT_USAGE, usage_error=(text, error.hint)))
        else:
            self._end(JobResult(EXIT_UNAVAILABLE, remark=f"no restart: {text}"))

    def _name_slow_nodes(self) -> None:
        awaited = [self._nodes[number].name for number in sorted(self._unanswered & set(self._nodes))]
        if awaited:
            self._nodes.broadcast_note(f"waiting for the check of {join_names(awaited)}")
