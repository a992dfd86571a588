"""The nodes that have joined a job, and where each stands in the attempt, as the coordinator has them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from ddplaunch.control.failure import Outcome
from ddplaunch.control.messages import Drained, End, Failed, Finished, Hello, Message, Note, Refused
from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.errors import EXIT_SIGNAL
from ddplaunch.plan.share import Share
from ddplaunch.wire.frames import Garbled


class Part(Enum):
    """Where a node stands in the attempt."""

    IDLE = "not in it"
    RUNNING = "its ranks run"
    FINISHED = "they have done their work"
    DRAINED = "nothing of the attempt is left there"


NEXT = {
    Part.IDLE: {Part.RUNNING},
    Part.RUNNING: {Part.FINISHED, Part.DRAINED},
    Part.FINISHED: {Part.DRAINED},
    Part.DRAINED: {Part.IDLE},
}


@dataclass
class Seat:
    """A node that has joined."""

    number: int
    hello: Hello
    part: Part = Part.IDLE
    ranks: range = range(0)  # those that it has in the attempt
    awaited: str = ""  # the note that it got last, on whom it waits for
    leaving: bool = False  # whether a signal there takes it out of the job

    @property
    def name(self) -> str:
        return self.hello.share.name

    @property
    def host(self) -> str:
        return self.hello.share.host

    @property
    def has_left(self) -> str:
        """What people read of a node that a signal has taken away."""
        return f"{self.name} has left: SIGTERM"

    @property
    def has_ranks(self) -> bool:
        """Whether something of the attempt is left there."""
        return self.part in (Part.RUNNING, Part.FINISHED)

    def enter(self, part: Part) -> None:
        assert part in NEXT[self.part], f"{self.part} to {part}"
        self.part = part

    def check(self, message: Failed | Finished | Drained, failed: Collection[int]) -> None:
        """Raise Garbled where it may not say this of its ranks now; ``failed`` are all that have failed so far."""
        if not self.has_ranks:
            raise Garbled("word of ranks that it does not run")
        failures = message.failures if isinstance(message, Drained) else ()
        if isinstance(message, Failed):
            failures = (message.failure,)
        ranks = [each.rank for each in failures]
        if len(set(ranks)) < len(ranks) or any(rank not in self.ranks for rank in ranks):
            raise Garbled("failures of ranks that are not its own")
        if any((each.attempt, each.host) != (message.attempt, self.host) for each in failures):
            raise Garbled("failures of another attempt or host")
        if isinstance(message, Failed) and message.failure.rank in failed:
            raise Garbled("the same failure again")
        if isinstance(message, Drained) and message.stopped > len(self.ranks):
            raise Garbled("more stopped ranks than it has")


class Seats(dict[int, Seat]):
    """The nodes that have joined, by node rank, and what they are told."""

    def __init__(self, rules: Rules, tell: Callable[[int, Message], None]) -> None:
        """``tell`` sends to a node."""
        super().__init__()
        self.rules, self.tell = rules, tell
        self._max = rules.max_nodes

    def tell_all(self, message: Message) -> None:
        for number in list(self):
            self.tell(number, message)

    def note(self, text: str, *, but: int | None = None) -> None:
        """Print a line on every node, ``but`` on one."""
        note = Note(text)
        for number in list(self):
            if number != but:
                self.tell(number, note)

    def let_go(self, seat: Seat) -> None:
        """Send a node that leaves its last message."""
        remark = "SIGTERM: this node has left the job, which goes on without it"
        self.tell(seat.number, End(Outcome(EXIT_SIGNAL + signal.SIGTERM, remark=remark)))

    @property
    def in_order(self) -> list[Seat]:
        return [self[number] for number in sorted(self)]

    def add(self, hello: Hello) -> None:
        number = hello.share.node_rank
        self[number] = Seat(number, hello)

    def numbered(self, hello: Hello) -> Hello:
        """The hello with a node rank, where it asked for one."""
        if hello.numbered:
            return hello
        return replace(hello, share=replace(hello.share, node_rank=self.free_rank(hello.share.node_rank)))

    def free_rank(self, preferred: int) -> int:
        """A node rank that is free: ``preferred``, or the lowest; the number of nodes where none is."""
        if preferred < self._max and preferred not in self:
            return preferred
        return next((number for number in range(self._max) if number not in self), self._max)

    def refusal(self, hello: Hello) -> Refused | None:
        """Why the node rank of this hello cannot be given; None where it can."""
        number = hello.share.node_rank
        if number >= self._max and hello.numbered:
            return Refused(f"node rank {number} is out of range: 0 to {self._max - 1}")
        if number >= self._max:
            return Refused(f"all {self._max} nodes of the job have joined already")
        if number in self:
            return Refused(
                f"node rank {number} is given twice: to {self[number].host} and to {hello.share.host}",
                "give every node a --node-rank of its own",
            )
        return None

    def start(self, line: Sequence[Seat]) -> tuple[Share, ...]:
        """Give these nodes, and no others, their ranks in a new attempt; return their shares, in order."""
        first = 0
        for seat in self.values():
            seat.ranks = range(0)
        for seat in line:
            seat.enter(Part.RUNNING)
            seat.awaited, seat.ranks = "", range(first, first + len(seat.hello.share.devices))
            first = seat.ranks.stop
        return tuple(seat.hello.share for seat in line)

    def rest(self) -> None:
        for seat in self.values():
            if seat.part is not Part.IDLE:
                seat.enter(Part.IDLE)

    def all_run(self) -> bool:
        """Whether no node of the attempt has finished."""
        return all(seat.part in (Part.RUNNING, Part.IDLE) for seat in self.values())
