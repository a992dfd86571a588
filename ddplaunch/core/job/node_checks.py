"""Node checks: before an attempt features may have every node check itself; a node that fails is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ddplaunch.base.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.text import format_duration, join_names
from ddplaunch.core.failures import FailureReport, JobResult
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.messages import CheckContinues, CheckPassed, CheckRequest, NodeStartError

SLOW_NODE_NOTICE_S = 5.0  # after this, print which nodes have not replied
CHECK_TIMEOUT_S = 25.0
"""Since the last message of a node: while its check runs it sends ``CheckContinues`` more often."""


class NodeChecks:
    """The checks before each attempt."""

    def __init__(self, nodes: NodeTable, membership: Membership) -> None:
        self._config, self._nodes, self._membership = nodes.config, nodes, membership
        self._request: CheckRequest | None = None  # for the latest attempt
        self._next: list[CheckRequest] = []  # those that follow, once all nodes have replied
        # Nodes without a reply, and until when they are waited for (monotonic); empty if no round is in progress.
        self._unanswered: dict[int, float] = {}
        self._is_noted = False  # whether a note has named those that are slow
        self.previous_failure: FailureReport | None = None  # of the attempt before, if a rank failed then

    @property
    def are_required(self) -> bool:
        """Whether nodes are checked before the latest attempt."""
        return self._request is not None

    def begin(self, requests: Iterable[CheckRequest]) -> bool:
        """Ask all nodes to check themselves before an attempt; return False if there is no request for them."""
        self._request, self._next = None, [*requests]
        return self._send_next()

    def _send_next(self) -> bool:
        """Send the next request to all nodes; return whether there is one."""
        if not self._next:
            return False
        self._request = self._next.pop(0)
        self._unanswered.clear()
        for number in self._nodes:
            self._wait_for(number)
        self._nodes.broadcast(self._request)
        self._set_notice()
        return True

    @property
    def _may_last(self) -> bool:
        """Whether the replies may take any time, as those of programs that get ready."""
        return self._request is not None and self._request.wait_s is None

    def _wait_for(self, number: int) -> None:
        self._unanswered[number] = math.inf if self._may_last else self._nodes.turn.now.mono + CHECK_TIMEOUT_S

    def _set_notice(self) -> None:
        if self._may_last:
            return self._nodes.turn.deadlines.cancel("slow checks")
        is_shown = self._config.is_multi_node
        self._is_noted = not is_shown
        self._nodes.turn.set_deadline("slow checks", SLOW_NODE_NOTICE_S if is_shown else CHECK_TIMEOUT_S)

    def send_check(self, number: int) -> None:
        """Ask one node, as one that has just joined. A reply while an attempt runs does not count for the next one."""
        if self._request is None:
            return
        if self._unanswered:
            self._wait_for(number)
            self._set_notice()
        self._nodes.send(number, self._request)

    def on_check(self, number: int, message: CheckPassed | CheckContinues) -> bool:
        """Called when a node has passed its check, or goes on with it; return whether all have passed."""
        if self._request is None or message.attempt != self._request.attempt:
            return False
        if isinstance(message, CheckPassed):
            return self.on_node_gone(number)
        if number in self._unanswered:
            self._wait_for(number)
        return False

    def on_node_gone(self, number: int) -> bool:
        """Called when a node needs no more waiting for: it passed, was left out or is lost. Return whether all have."""
        was_last = [*self._unanswered] == [number]
        self._unanswered.pop(number, None)
        return was_last and not self._send_next()

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

        A check has timeouts of its own, so a node that sends nothing has a bug, and gets its ranks.
        """
        now = self._nodes.turn.now.mono
        silent = [number for number, until in self._unanswered.items() if until <= now]
        if silent:
            what = self._name(silent) if self._config.is_multi_node else "this machine"
            waited = format_duration(CHECK_TIMEOUT_S)
            self._nodes.broadcast_note(f"the check of {what} has not answered in {waited}: the ranks start without it")
        for number in silent:
            del self._unanswered[number]
        if not self._unanswered:
            return bool(silent) and not self._send_next()
        if not silent and not self._is_noted:
            self._is_noted = True
            self._nodes.broadcast_note(f"waiting for the check of {self._name(self._unanswered)}")
        self._nodes.turn.set_deadline("slow checks", min(self._unanswered.values()) - now)
        return False

    def _name(self, numbers: Iterable[int]) -> str:
        return join_names(self._nodes[number].name for number in sorted(numbers) if number in self._nodes)
