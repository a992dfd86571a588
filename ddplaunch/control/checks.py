"""Before each attempt every node checks its machine: which have answered, and what follows if one lacks something."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.control.failure import FailureReport, JobResult
from ddplaunch.control.membership import Membership
from ddplaunch.control.messages import CheckNode, EndJob, NodeStartError
from ddplaunch.control.seat import JoinedNode, NodeTable
from ddplaunch.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.words import join_names

SLOW_NODE_NOTICE_S = 5.0  # seconds after which people read whose answer is awaited


class NodeChecks:
    """The checks of one attempt after the other."""

    def __init__(
        self,
        seats: NodeTable,
        membership: Membership,
        call_later: Callable[[float, Callable[[], None]], None],
        start: Callable[[], None],
        end: Callable[[JobResult], None],
    ) -> None:
        """``call_later`` forgets what an attempt leaves; ``start`` is called when every node has what its ranks need."""
        self._rules, self._seats, self._membership = seats.rules, seats, membership
        self._after, self._start, self._end = call_later, start, end
        self._attempt = 0
        self._awaited: set[int] = set()  # empty but while all check themselves

    def begin(self, attempt: int) -> None:
        """Ask all nodes."""
        self._attempt = attempt
        self._awaited = set(self._seats)
        for number in list(self._seats):
            self.send_check(number)
        if self._rules.is_multi_node:
            self._after(SLOW_NODE_NOTICE_S, self._name_slow_nodes)

    def send_check(self, number: int) -> None:
        """Ask one node. Of what it answers while an attempt runs, nothing counts for the next."""
        if self._awaited:
            self._awaited.add(number)
        self._seats.tell(number, CheckNode(self._attempt, self._rules.gpu_memory_timeout))

    def on_check_passed(self, number: int, attempt: int) -> None:
        """A node has what its ranks need in this attempt."""
        if attempt == self._attempt:
            self.on_node_gone(number)

    def on_node_gone(self, number: int) -> None:
        """This node has answered, or is lost."""
        if number in self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self._start()

    def on_check_failed(
        self, seat: JoinedNode, error: NodeStartError, previous_failure: FailureReport | None, *, first: bool
    ) -> None:
        """A node lacks something: go on without it, or end the job.

        ``previous_failure`` is how the attempt before has failed, where it did; ``first``: whether there was none.
        """
        if self._membership.can_spare(seat):
            text = f"{seat.name} is left out: {error.message}"
            del self._seats[seat.node_rank]
            self._seats.broadcast_note(text)
            self._seats.tell(seat.node_rank, EndJob(JobResult(EXIT_USAGE, usage_error=(text, error.hint))))
            return self.on_node_gone(seat.node_rank)
        text = f"{seat.name}: {error.message}" if self._rules.is_multi_node else error.message
        if seat.node_rank and self._rules.is_elastic:
            left = self._membership.usable_count - self._membership.is_usable(seat)
            text += f"; without it {left} of at least {self._rules.min_nodes} nodes are left"
        if previous_failure is not None:
            self._end(JobResult(previous_failure.first.shell_exit_code, previous_failure, remark=f"no restart: {text}"))
        elif first:
            self._end(JobResult(EXIT_USAGE, usage_error=(text, error.hint)))
        else:
            self._end(JobResult(EXIT_UNAVAILABLE, remark=f"not started again: {text}"))

    def _name_slow_nodes(self) -> None:
        awaited = [self._seats[number].name for number in sorted(self._awaited & set(self._seats))]
        if awaited:
            self._seats.broadcast_note(f"waiting for the check of {join_names(awaited)}")
