"""Node checks: before an attempt features may have every node check itself; a node that fails is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ddplaunch.base.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.text import format_duration, join_names
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.failures import FailureReport, JobResult
from ddplaunch.core.job.job_deadlines import ChecksLate
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.machine import Command, Send
from ddplaunch.core.messages import CheckContinues, CheckPassed, CheckRequest, NodeStartError

SLOW_NODE_NOTICE_S = 5.0  # after this, print which nodes have not replied
CHECK_TIMEOUT_S = 25.0
"""Since the last message of a node: while its check runs it sends ``CheckContinues`` more often."""


class NodeChecks:
    """The checks before each attempt."""

    def __init__(self, nodes: NodeTable, deadlines: Deadlines[Deadline], membership: Membership) -> None:
        self._config, self._nodes, self._membership, self._deadlines = nodes.config, nodes, membership, deadlines
        self._request: CheckRequest | None = None  # for the latest attempt
        self._next: list[CheckRequest] = []  # the checks to request once all nodes have replied to this one
        # Nodes without a reply, and until when they are waited for (monotonic); empty if no round is in progress.
        self._unanswered: dict[int, float] = {}
        self._is_noted = False  # whether a note has named those that are slow
        self.previous_failure: FailureReport | None = None  # of the attempt before, if a rank failed then

    @property
    def are_required(self) -> bool:
        """Whether a feature has requested a check before the latest attempt."""
        return self._request is not None

    @property
    def are_done(self) -> bool:
        """Whether all nodes have replied and no further check follows."""
        return not self._unanswered and not self._next

    def begin(self, requests: Iterable[CheckRequest], now: Now) -> list[Command]:
        """Send all nodes the first of the check requests before an attempt, if there are any."""
        self._request, self._next = None, [*requests]
        self._unanswered.clear()
        return self._send_next(now)

    def _send_next(self, now: Now) -> list[Command]:
        """Send the next request to all nodes, if there is one."""
        if not self._next:
            return []
        self._request = self._next.pop(0)
        self._unanswered.clear()
        for number in self._nodes:
            self._await_reply(number, now)
        self._set_deadline(now)
        return self._nodes.to_all(self._request)

    @property
    def _has_no_timeout(self) -> bool:
        """Whether the replies to this request have no time limit, as when programs have to become ready."""
        return self._request is not None and self._request.wait_s is None

    def _await_reply(self, number: int, now: Now) -> None:
        self._unanswered[number] = math.inf if self._has_no_timeout else now.mono + CHECK_TIMEOUT_S

    def _set_deadline(self, now: Now) -> None:
        if self._has_no_timeout:
            return self._deadlines.cancel(ChecksLate())
        is_shown = self._config.is_multi_node
        self._is_noted = not is_shown
        self._deadlines.set(ChecksLate(), now.mono + (SLOW_NODE_NOTICE_S if is_shown else CHECK_TIMEOUT_S))

    def send_check(self, number: int, now: Now) -> list[Command]:
        """Check one node that has just joined. A reply while an attempt runs does not count for the next attempt."""
        if self._request is None:
            return []
        if self._unanswered:
            self._await_reply(number, now)
            self._set_deadline(now)
        return [Send(number, self._request)]

    def on_check(self, number: int, message: CheckPassed | CheckContinues, now: Now) -> list[Command]:
        """Called when a node has passed its check, or goes on with it."""
        if self._request is None or message.attempt != self._request.attempt:
            return []
        if isinstance(message, CheckPassed):
            return self.stop_awaiting_node(number, now)
        if number in self._unanswered:
            self._await_reply(number, now)
        return []

    def stop_awaiting_node(self, number: int, now: Now) -> list[Command]:
        """Called when no reply of a node is awaited any more: it has passed, was left out or is lost."""
        was_last = [*self._unanswered] == [number]
        self._unanswered.pop(number, None)
        return self._send_next(now) if was_last else []

    def on_check_failed(self, node: JoinedNode, error: NodeStartError, *, first: bool) -> JobResult | str:
        """Called when a node's check failed: return the job's result, or how it goes on without the node.

        ``first``: before the first attempt.
        """
        if self._membership.can_continue_without(node):
            return f"{node.name} is left out: {error.message}"
        text = f"{node.name}: {error.message}" if self._config.is_multi_node else error.message
        if node.node_rank and self._config.is_elastic:
            text += f"; without it {self._membership.shortage_without(node)}"
        if (failure := self.previous_failure) is not None:
            return JobResult(failure.first.shell_exit_code, failure, remark=f"no restart: {text}", node=node.host)
        if first:
            return JobResult(EXIT_USAGE, usage_error=(text, error.hint), node=node.host)
        return JobResult(EXIT_UNAVAILABLE, remark=f"no restart: {text}", node=node.host)

    def on_deadline(self, now: Now) -> list[Command]:
        """Handle ``ChecksLate``: print which nodes have not replied.

        A check has timeouts of its own, so a node that sends nothing has a bug, and gets its ranks.
        """
        silent = [number for number, until in self._unanswered.items() if until <= now.mono]
        commands: list[Command] = []
        if silent:
            what = self._name(silent) if self._config.is_multi_node else "this machine"
            waited = format_duration(CHECK_TIMEOUT_S)
            commands += self._nodes.note_to_all(
                f"the check of {what} has not answered in {waited}: the ranks start without it"
            )
        for number in silent:
            del self._unanswered[number]
        if not self._unanswered:
            return commands + self._send_next(now)
        if not silent and not self._is_noted:
            self._is_noted = True
            commands += self._nodes.note_to_all(f"waiting for the check of {self._name(self._unanswered)}")
        self._deadlines.set(ChecksLate(), now.mono + (min(self._unanswered.values()) - now.mono))
        return commands

    def _name(self, numbers: Iterable[int]) -> str:
        return join_names(self._nodes[number].name for number in sorted(numbers) if number in self._nodes)
