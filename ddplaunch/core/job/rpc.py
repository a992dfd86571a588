"""Requests to all nodes: node 0 asks every node that has ranks, for itself or for the node that sent the request.

A feature declares the kinds of its requests: ``Feature.rpc_kinds``. Pure: no sockets, no clock. A peer may be broken
or hostile: ``convert_payload`` checks the fields on arrival, ``Rpc`` what a node may claim, before anything uses them.
A kind that raises is reported once; from then on its requests are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import convert
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.isolation import Isolation
from ddplaunch.core.job.job_deadlines import RequestLate
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.machine import Command, CommandCollector, Send
from ddplaunch.core.messages import Message, NoteMessage, RpcReply, RpcRequest
from ddplaunch.core.rpc_kind import Kind

MAX_OPEN_REQUESTS = 64
TOO_MANY_ERROR = "too many requests to the nodes are open"
BUG_ERROR = "a bug in ddplaunch, which node 0 has reported, prevents the reply"


@cache
def find_kind(name: str) -> Kind:
    """Return the kind of this name; ProtocolError if no feature declares it."""
    for module in load_features().modules("rpc_kinds"):
        kind: Kind = module.KIND
        if kind.name == name:
            return kind
    raise ProtocolError("a request of an unknown kind")


def convert_payload(message: Message) -> Message:
    """Return a peer's message with its payload, if any, converted to its kind's type; ProtocolError if invalid."""
    if isinstance(message, RpcRequest):
        return replace(message, payload=convert(message.payload, find_kind(message.kind).request))
    if isinstance(message, RpcReply) and message.payload is not None:
        return replace(message, payload=convert(message.payload, find_kind(message.kind).reply))
    return message


class _OpenRequest(Struct):
    kind: Kind
    client: tuple[int, int] | None  # the node that sent it, and its serial there; None: node 0 itself
    on_done: Callable[[Any], None] | None
    waiting_for: dict[int, range]  # nodes without a last reply, with their ranks
    replies: dict[int, Any] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)  # ranks that replies were about


class Rpc(CommandCollector):
    """All open requests to all nodes, on node 0, by serial number."""

    def __init__(
        self, nodes: NodeTable, deadlines: Deadlines[Deadline], kinds: Mapping[str, Kind] | None = None
    ) -> None:
        """``kinds``: by name; None for those of all features."""
        super().__init__()
        self._nodes, self._deadlines = nodes, deadlines
        self._find = find_kind if kinds is None else kinds.__getitem__
        self._open: dict[int, _OpenRequest] = {}
        self._serial = 0
        self._isolations: dict[str, Isolation] = {}  # by kind
        self._gathered: deque[tuple[Callable[[Any], None], Any]] = deque()

    def deliver_next_reply(self) -> bool:
        """Call the next ``on_done`` of ``gather``, once the event is handled; return False if there is none."""
        if self._gathered:
            on_done, reply = self._gathered.popleft()
            on_done(reply)
            return True
        return False

    def _find_isolation(self, kind: Kind) -> Isolation:
        if kind.name not in self._isolations:
            self._isolations[kind.name] = Isolation(f"the request {kind.name}", self._report)
        return self._isolations[kind.name]

    def _report(self, text: str) -> None:
        self._do(Send(0, NoteMessage(text)))

    def gather(
        self, kind: str, request: Any, on_done: Callable[[Any], None], now: Now, timeout_s: float | None = None
    ) -> list[Command]:
        """Ask all nodes with ranks; ``on_done`` gets the merged reply, after ``timeout_s`` (None: the kind's) at most.

        ``on_done`` gets None if the kind raises, or has raised before. It is called by ``deliver_next_reply``.
        """
        rpc_kind = self._find(kind)
        if self._find_isolation(rpc_kind).failed:
            self._gathered.append((on_done, None))
        else:
            self._begin_request(rpc_kind, request, timeout_s, None, now, on_done)
        return self.take_commands()

    def _begin_request(
        self,
        kind: Kind,
        request: Any,
        timeout_s: float | None,
        client: tuple[int, int] | None,
        now: Now,
        on_done: Callable[[Any], None] | None = None,
    ) -> None:
        self._serial += 1
        serial, timeout_s = self._serial, min(timeout_s or kind.timeout_s, kind.timeout_s)
        waiting_for = {node.node_rank: node.ranks for node in self._nodes.values() if node.has_ranks}
        self._deadlines.set(RequestLate(serial), now.mono + timeout_s)
        self._open[serial] = _OpenRequest(kind, client, on_done, waiting_for)
        message = RpcRequest(serial, kind.name, timeout_s, request)
        for number in sorted(waiting_for):
            self._do(Send(number, message))
        self._close_if_complete(serial, now)

    def on_message(self, number: int, message: RpcRequest | RpcReply, now: Now) -> list[Command]:
        """Handle a request or a reply of a node; ProtocolError if a reply is about ranks that are not its own."""
        if isinstance(message, RpcReply):
            self._on_reply(number, message, now)
        else:
            self._on_request(number, message, now)
        return self.take_commands()

    def _on_request(self, number: int, message: RpcRequest, now: Now) -> None:
        kind, refusal = self._find(message.kind), ""
        if len(self._open) >= MAX_OPEN_REQUESTS:
            refusal = TOO_MANY_ERROR
        elif self._find_isolation(kind).failed:
            refusal = BUG_ERROR
        elif any(each.kind is kind for each in self._open.values()):
            refusal = kind.busy_error
        if refusal:
            return self._do(Send(number, RpcReply(message.serial, kind.name, refusal=refusal)))
        self._begin_request(kind, message.payload, message.timeout_s, (number, message.serial), now)

    def _on_reply(self, number: int, message: RpcReply, now: Now) -> None:
        pending = self._open.get(message.serial)
        if pending is None or number not in pending.waiting_for:  # it is late
            return
        kind, part = pending.kind, message.payload
        if number:  # node 0 is this process and needs no check
            self._check_reply(pending, pending.waiting_for[number], message)
            offset, isolation = self._nodes.clock_offset_of(number), self._find_isolation(kind)
            part = None if part is None else isolation.call(kind.to_local_clock, part, offset, now.wall)
        if not kind.in_parts:
            pending.replies[number] = part
        elif part is not None:
            self._reply(pending, RpcReply(0, kind.name, part, is_last=False))
        if message.is_last:
            del pending.waiting_for[number]
            self._close_if_complete(message.serial, now)

    def _check_reply(self, pending: _OpenRequest, ranks: range, message: RpcReply) -> None:
        kind, is_end = pending.kind, message.payload is None
        if message.kind != kind.name or not (kind.in_parts or (message.is_last and not is_end)):
            raise ProtocolError("a reply to another request")
        claims = () if is_end else self._find_isolation(kind).call(lambda: list(kind.claimed_ranks(message.payload)))
        claimed = claims or ()
        before = len(pending.claimed)
        if any(rank not in ranks for rank in claimed) or len(pending.claimed | {*claimed}) < before + len(claimed):
            raise ProtocolError("a reply about ranks that are not its own, or again")
        pending.claimed.update(claimed)

    def _reply(self, pending: _OpenRequest, reply: RpcReply) -> None:
        """Send a reply to the node that has sent the request, with the request's serial number on that node."""
        if pending.client is not None:
            number, serial = pending.client
            self._do(Send(number, replace(reply, serial=serial)))

    def on_node_lost(self, number: int, now: Now) -> list[Command]:
        """Called when a node is lost: stop waiting for it; neither it nor a node in its place gets a reply."""
        for each in self._open.values():
            if each.client is not None and each.client[0] == number:
                each.client = None
        for serial in [serial for serial, each in self._open.items() if each.waiting_for.pop(number, None) is not None]:
            self._close_if_complete(serial, now)
        return self.take_commands()

    def on_deadline(self, late: RequestLate, now: Now) -> list[Command]:
        """Called when the time for a request is over: reply with what the nodes have sent so far."""
        self._close_request(late.serial, now)
        return self.take_commands()

    def end(self) -> None:
        """Called when the job ends: drop all open requests."""
        self._open.clear()
        self._gathered.clear()

    def _close_if_complete(self, serial: int, now: Now) -> None:
        if not self._open[serial].waiting_for:
            self._close_request(serial, now)

    def _close_request(self, serial: int, now: Now) -> None:
        pending = self._open.pop(serial)
        self._deadlines.cancel(RequestLate(serial))
        silent = tuple(self._nodes[number].name for number in sorted(pending.waiting_for) if number in self._nodes)
        world_size = sum(len(node.ranks) for node in self._nodes.values())
        isolation, kind = self._find_isolation(pending.kind), pending.kind
        payload = isolation.call(kind.merge, pending.replies, silent, world_size, now.wall)
        if pending.on_done is not None:
            self._gathered.append((pending.on_done, payload))
        if pending.client is not None:
            payload = isolation.call(
                kind.convert_for_requester, payload, pending.replies, self._nodes.clock_offset_of, pending.client[0]
            )
            refusal = BUG_ERROR if isolation.failed else ""
            self._reply(pending, RpcReply(serial, kind.name, payload, silent_nodes=silent, refusal=refusal))
