"""The job's table of joined nodes: each one's hello, ranks and phase in the attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.clock_offset import LOCAL_CLOCK, UNKNOWN, ClockOffset
from ddplaunch.core.failures import JobResult
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Command, Send, Transitions, next_phase
from ddplaunch.core.messages import (
    AttemptReport,
    EndJob,
    FailureReported,
    JoinRefused,
    Message,
    NodeHello,
    NoteMessage,
    RanksFinished,
    StartAttempt,
)
from ddplaunch.system.plan import node_spec


class NodePhase(Enum):
    """The phase of a node in the attempt."""

    IDLE = "has no ranks"
    RUNNING = "its ranks run"
    FINISHED = "its ranks have ended with 0"
    DRAINED = "has sent its AttemptReport"


class NodeStep(Enum):
    """A step of a node: what happens to it in an attempt."""

    START = "it gets StartAttempt"
    FINISH = "it sends RanksFinished"
    REPORT = "it sends its AttemptReport"
    CLEAR = "the attempt is over"


NODE_TRANSITIONS: Transitions[NodePhase, NodeStep] = {
    NodePhase.IDLE: {NodeStep.START: NodePhase.RUNNING, NodeStep.CLEAR: NodePhase.IDLE},
    NodePhase.RUNNING: {NodeStep.FINISH: NodePhase.FINISHED, NodeStep.REPORT: NodePhase.DRAINED},
    NodePhase.FINISHED: {NodeStep.FINISH: NodePhase.FINISHED, NodeStep.REPORT: NodePhase.DRAINED},
    NodePhase.DRAINED: {NodeStep.CLEAR: NodePhase.IDLE},
}


class JoinedNode(Struct):
    """A node that has joined."""

    node_rank: int
    hello: NodeHello
    phase: NodePhase = NodePhase.IDLE
    ranks: range = range(0)  # in the attempt
    last_wait_note: str = ""  # the last "waiting for …" that was sent to it
    leaving: bool = False  # a SIGTERM there removes it from the job
    clock_offset: ClockOffset = UNKNOWN

    @property
    def name(self) -> str:
        return self.hello.node_spec.name

    @property
    def host(self) -> str:
        return self.hello.node_spec.host

    @property
    def rank_count(self) -> int:
        """How many ranks the node has in an attempt."""
        return len(self.hello.node_spec.devices)

    @property
    def leave_note(self) -> str:
        """The note that a SIGTERM has removed this node."""
        return f"{self.name} has left: SIGTERM"

    def end(self, result: JobResult) -> Send:
        """Return the command that ends this node alone."""
        return Send(self.node_rank, EndJob(result))

    @property
    def has_ranks(self) -> bool:
        """Whether ranks of the attempt may still run on this node."""
        return self.phase in (NodePhase.RUNNING, NodePhase.FINISHED)

    def take_step(self, step: NodeStep) -> None:
        self.phase = next_phase(NODE_TRANSITIONS, self.phase, step)

    def validate_message(
        self, message: FailureReported | RanksFinished | AttemptReport, failed: Collection[int]
    ) -> None:
        """Raise ProtocolError if this node cannot send this now; ``failed``: all ranks that have failed so far."""
        if not self.has_ranks:
            raise ProtocolError("a message about ranks that it does not run")
        match message:
            case FailureReported(failure=failure):
                if failure.rank not in self.ranks:
                    raise ProtocolError("the failure of a rank that is not its own")
                if (failure.attempt, failure.host) != (message.attempt, self.host):
                    raise ProtocolError("the failure of another attempt or host")
                if failure.rank in failed:
                    raise ProtocolError("the same failure again")
            case AttemptReport():
                if message.stopped > len(self.ranks):
                    raise ProtocolError("more stopped ranks than it has")
                if any(rank not in self.ranks or rank not in failed for rank, _ in message.tails):
                    raise ProtocolError("the last lines of a rank that has not failed there")


class NodeTable(dict[int, JoinedNode]):
    """The joined nodes by node rank."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__()
        self.config = config
        self._max = config.max_nodes

    def clock_offset_of(self, number: int) -> ClockOffset:
        """Return how far the clock of a node is ahead."""
        if number == 0:
            return LOCAL_CLOCK
        return self[number].clock_offset if number in self else UNKNOWN

    def to_all(self, message: Message) -> list[Command]:
        """Return the commands that send a message to all nodes."""
        return [Send(number, message) for number in self]

    def note_to_all(self, text: str, *, but: int | None = None) -> list[Command]:
        """Return the commands that print a note on every node except ``but``."""
        note = NoteMessage(text)
        return [Send(number, note) for number in self if number != but]

    @property
    def sorted_nodes(self) -> list[JoinedNode]:
        return [self[number] for number in sorted(self)]

    def add(self, hello: NodeHello) -> None:
        number = hello.node_spec.node_rank
        self[number] = JoinedNode(number, hello)

    def assign_node_rank(self, hello: NodeHello) -> NodeHello:
        """Return ``hello`` with a node rank filled in if it has none.

        It is the preferred one, else the lowest free one, or ``max_nodes`` if all are taken.
        """
        preferred = hello.node_spec.node_rank
        if hello.has_node_rank or (preferred < self._max and preferred not in self):
            return hello
        free = next((number for number in range(self._max) if number not in self), self._max)
        return replace(hello, node_spec=replace(hello.node_spec, node_rank=free))

    def node_rank_refusal(self, hello: NodeHello) -> JoinRefused | None:
        """Return why this hello's node rank is not available; None if it is."""
        number = hello.node_spec.node_rank
        if number >= self._max and hello.has_node_rank:
            return JoinRefused(f"node rank {number} is out of range: 0 to {self._max - 1}")
        if number >= self._max:
            return JoinRefused(f"all {self._max} nodes of the job have joined already")
        if number in self:
            return JoinRefused(
                f"node rank {number} is used twice: by {self[number].host} and by {hello.node_spec.host}",
                "give every node a --node-rank of its own",
            )
        return None

    def start_ranks(self, nodes: Sequence[JoinedNode], attempt: int, run_id: str) -> Iterator[Command]:
        """Assign the ranks of a new attempt to these nodes only; yield the commands that send each its StartAttempt."""
        first, specs = 0, tuple(node.hello.node_spec for node in nodes)
        for node in self.values():
            node.ranks = range(0)
        for node in nodes:
            node.take_step(NodeStep.START)
            node.last_wait_note, node.ranks = "", range(first, first + node.rank_count)
            first = node.ranks.stop
        for node, assignment in zip(nodes, node_spec.assign_nodes(specs), strict=True):
            # Node 0 comes first: it removes an old FileStore before another node can open it.
            node_specs = () if node.node_rank else specs
            yield Send(node.node_rank, StartAttempt(attempt, run_id, assignment, node_specs=node_specs))

    def clear_assignments(self) -> None:
        for node in self.values():
            node.take_step(NodeStep.CLEAR)

    def are_all_running(self) -> bool:
        """Whether no node of the attempt has finished."""
        return all(node.phase in (NodePhase.RUNNING, NodePhase.IDLE) for node in self.values())
