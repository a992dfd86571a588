"""Where the job stands, and each of its nodes in it, as the coordinator has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from ddplaunch.control.messages import Drained, Failed, Finished, Garbled, Hello, Refused


class Stage(Enum):
    """Where the job stands."""

    JOINING = "waiting for nodes"
    RUNNING = "an attempt runs"
    STOPPING = "an attempt is being stopped"
    PAUSING = "waiting to start again"
    ENDED = "all is over"


class Part(Enum):
    """Where a node stands in the attempt."""

    IDLE = "not in it"
    RUNNING = "its ranks run"
    FINISHED = "they have done their work"
    DRAINED = "nothing of the attempt is left there"


@dataclass
class Seat:
    """A node that has joined.

    Attributes:
        ranks: those that it has in the attempt.
        told: whom it was last told that it waits for.
    """

    number: int
    hello: Hello
    part: Part = Part.IDLE
    ranks: range = range(0)
    told: str = ""

    @property
    def name(self) -> str:
        """How people are told of it: "node 1 (n1)"."""
        return self.hello.share.name

    @property
    def host(self) -> str:
        return self.hello.share.host

    def check(self, message: Failed | Finished | Drained, failed: Collection[int]) -> None:
        """Make sure that it may say this of its ranks now, when these of the job have ``failed`` already.

        Raises:
            Garbled: it may not.
        """
        if self.part in (Part.IDLE, Part.DRAINED):
            raise Garbled("word of ranks that it does not run")
        failures = () if isinstance(message, Finished) else message.failures
        ranks = [each.rank for each in failures]
        if len(set(ranks)) < len(ranks) or any(rank not in self.ranks for rank in ranks):
            raise Garbled("failures of ranks that are not its own")
        if any((each.attempt, each.host) != (message.attempt, self.host) for each in failures):
            raise Garbled("failures of another attempt or host")
        if isinstance(message, Failed) and message.failure.rank in failed:
            raise Garbled("the same failure again")
        if isinstance(message, Drained) and message.stopped > len(self.ranks):
            raise Garbled("more stopped ranks than it has")


def no_seat(hello: Hello, seats: Mapping[int, Seat], max_nodes: int) -> Refused | None:
    """Say why there is no seat of that number among ``max_nodes``; None where it is free."""
    number = hello.share.node_rank
    if number >= max_nodes and hello.numbered:
        return Refused(f"node rank {number} is out of range: 0 to {max_nodes - 1}")
    if number >= max_nodes:
        return Refused(f"all {max_nodes} nodes of the job are there already")
    if number in seats:
        return Refused(
            f"node rank {number} is taken twice: by {seats[number].host} and by {hello.share.host}",
            "give every node a --node-rank of its own",
        )
    return None
