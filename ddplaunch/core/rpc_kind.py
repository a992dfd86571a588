"""A kind of request to all nodes: what a feature declares to ask about all ranks of a running job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.messages import RpcRequest

if TYPE_CHECKING:
    from ddplaunch.core.agent.node_ranks import NodeRanks

GetOffset = Callable[[int], ClockOffset]  # returns the clock offset of a node
Reply = Callable[[Any, bool], None]  # sends a payload, and whether it is the last


class Kind:
    """Base class of the kinds of requests to all nodes. A node replies once, or (``in_parts``) many times."""

    name: ClassVar[str]
    request: ClassVar[Any]  # the type of a request's payload
    reply: ClassVar[Any]  # the type of a reply's payload
    timeout_s: ClassVar[float]  # the longest that a request may take
    in_parts: ClassVar[bool] = False  # whether replies are forwarded one by one; if not, ``merge`` makes one of all
    busy_error: ClassVar[str] = ""  # refuses a request while another of this kind is open; "": several may be open

    def claimed_ranks(self, reply: Any) -> Iterable[int]:
        """Return the ranks that a reply is about; a node may reply once about each of its own."""
        raise NotImplementedError

    def to_local_clock(self, reply: Any, offset: ClockOffset, now: float) -> Any:
        """Convert the times in another node's reply, which arrived at ``now``, to node 0's clock."""
        return reply

    def merge(self, replies: Mapping[int, Any], silent_nodes: tuple[str, ...], world_size: int, now: float) -> Any:
        """Merge the nodes' replies into one; ``silent_nodes``: those that did not finish in time, as "node 2 (n2)"."""

    def convert_for_requester(self, reply: Any, replies: Mapping[int, Any], clock_of: GetOffset, node: int) -> Any:
        """Return a merged reply in the form for the node that sent the request."""
        return reply

    def answer(self, loop: EventLoop, ranks: NodeRanks, request: RpcRequest, reply: Reply) -> None:
        """Answer a request on a node, now or later."""
        raise NotImplementedError
