"""The nodes that have joined a job, and where each stands in the attempt, as the coordinator has them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from ddplaunch.control.failure import JobResult
from ddplaunch.control.messages import (
    AttemptReport,
    EndJob,
    FailureReported,
    JoinRefused,
    Message,
    NodeHello,
    NoteMessage,
    RanksFinished,
)
from ddplaunch.control.rules import JobConfig
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.errors import EXIT_SIGNAL
from ddplaunch.plan.share import NodeSpec
from ddplaunch.wire.frames import ProtocolError


class NodePhase(Enum):
    """Where a node stands in the attempt."""

    IDLE = "not in it"
    RUNNING = "its ranks run"
    FINISHED = "they have done their work"
    DRAINED = "nothing of the attempt is left there"


NODE_PHASE_TRANSITIONS = {
    NodePhase.IDLE: {NodePhase.RUNNING},
    NodePhase.RUNNING: {NodePhase.FINISHED, NodePhase.DRAINED},
    NodePhase.FINISHED: {NodePhase.DRAINED},
    NodePhase.DRAINED: {NodePhase.IDLE},
}


@dataclass
class JoinedNode:
    """A node that has joined."""

    node_rank: int
    hello: NodeHello
    phase: NodePhase = NodePhase.IDLE
    ranks: range = range(0)  # those that it has in the attempt
    last_wait_note: str = ""  # the note that it got last, on whom it waits for
    leaving: bool = False  # whether a signal there takes it out of the job

    @property
    def name(self) -> str:
        return self.hello.node_spec.name

    @property
    def host(self) -> str:
        return self.hello.node_spec.host

    @property
    def has_left(self) -> str:
        """What people read of a node that a signal has taken away."""
        return f"{self.name} has left: SIGTERM"

    @property
    def has_ranks(self) -> bool:
        """Whether something of the attempt is left there."""
        return self.phase in (NodePhase.RUNNING, NodePhase.FINISHED)

    def set_phase(self, part: NodePhase) -> None:
        assert part in NODE_PHASE_TRANSITIONS[self.phase], f"{self.phase} to {part}"
        self.phase = part

    def validate_message(
        self, message: FailureReported | RanksFinished | AttemptReport, failed: Collection[int]
    ) -> None:
        """Raise Garbled where it may not say this of its ranks now; ``failed`` are all that have failed so far."""
        if not self.has_ranks:
            raise ProtocolError("word of ranks that it does not run")
        failures = message.failures if isinstance(message, AttemptReport) else ()
        if isinstance(message, FailureReported):
            failures = (message.failure,)
        ranks = [each.rank for each in failures]
        if len(set(ranks)) < len(ranks) or any(rank not in self.ranks for rank in ranks):
            raise ProtocolError("failures of ranks that are not its own")
        if any((each.attempt, each.host) != (message.attempt, self.host) for each in failures):
            raise ProtocolError("failures of another attempt or host")
        if isinstance(message, FailureReported) and message.failure.rank in failed:
            raise ProtocolError("the same failure again")
        if isinstance(message, AttemptReport) and message.stopped > len(self.ranks):
            raise ProtocolError("more stopped ranks than it has")


class NodeTable(dict[int, JoinedNode]):
    """The nodes that have joined, by node rank, and what they are told."""

    def __init__(self, config: JobConfig, send: Callable[[int, Message], None]) -> None:
        """``send`` sends to a node."""
        super().__init__()
        self.rules, self.tell = config, send
        self._max = config.max_nodes

    def broadcast(self, message: Message) -> None:
        for number in list(self):
            self.tell(number, message)

    def broadcast_note(self, text: str, *, but: int | None = None) -> None:
        """Print a line on every node, ``but`` on one."""
        note = NoteMessage(text)
        for number in list(self):
            if number != but:
                self.tell(number, note)

    def let_go(self, seat: JoinedNode) -> None:
        """Send a node that leaves its last message."""
        remark = "SIGTERM: this node has left the job, which goes on without it"
        self.tell(seat.node_rank, EndJob(JobResult(EXIT_SIGNAL + signal.SIGTERM, remark=remark)))

    @property
    def sorted_nodes(self) -> list[JoinedNode]:
        return [self[number] for number in sorted(self)]

    def add(self, hello: NodeHello) -> None:
        number = hello.node_spec.node_rank
        self[number] = JoinedNode(number, hello)

    def assign_node_rank(self, hello: NodeHello) -> NodeHello:
        """The hello with a node rank, where it asked for one."""
        if hello.has_node_rank:
            return hello
        return replace(
            hello, node_spec=replace(hello.node_spec, node_rank=self.free_node_rank(hello.node_spec.node_rank))
        )

    def free_node_rank(self, preferred: int) -> int:
        """A node rank that is free: ``preferred``, or the lowest; the number of nodes where none is."""
        if preferred < self._max and preferred not in self:
            return preferred
        return next((number for number in range(self._max) if number not in self), self._max)

    def rank_refusal(self, hello: NodeHello) -> JoinRefused | None:
        """Why the node rank of this hello cannot be given; None where it can."""
        number = hello.node_spec.node_rank
        if number >= self._max and hello.has_node_rank:
            return JoinRefused(f"node rank {number} is out of range: 0 to {self._max - 1}")
        if number >= self._max:
            return JoinRefused(f"all {self._max} nodes of the job have joined already")
        if number in self:
            return JoinRefused(
                f"node rank {number} is given twice: to {self[number].host} and to {hello.node_spec.host}",
                "give every node a --node-rank of its own",
            )
        return None

    def assign_ranks(self, nodes: Sequence[JoinedNode]) -> tuple[NodeSpec, ...]:
        """Give these nodes, and no others, their ranks in a new attempt; return their shares, in order."""
        first = 0
        for seat in self.values():
            seat.ranks = range(0)
        for seat in nodes:
            seat.set_phase(NodePhase.RUNNING)
            seat.last_wait_note, seat.ranks = "", range(first, first + len(seat.hello.node_spec.devices))
            first = seat.ranks.stop
        return tuple(seat.hello.node_spec for seat in nodes)

    def clear_assignments(self) -> None:
        for seat in self.values():
            if seat.phase is not NodePhase.IDLE:
                seat.set_phase(NodePhase.IDLE)

    def are_all_running(self) -> bool:
        """Whether no node of the attempt has finished."""
        return all(seat.phase in (NodePhase.RUNNING, NodePhase.IDLE) for seat in self.values())
