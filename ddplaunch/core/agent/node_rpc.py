"""One node's part in requests to all nodes: sends its own to node 0, and answers node 0's about this node's ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.isolation import IsolatedLoop, Isolation
from ddplaunch.core.messages import FromNode, RpcReply, RpcRequest
from ddplaunch.core.rpc_kind import Kind, Reply

NODE_ZERO_MARGIN_S = 1.0  # beyond the timeout of a request, for node 0 to reply
Handler = Callable[[EventLoop, NodeRanks, RpcRequest, Reply], None]


class NodeRpc:
    """Sends this node's requests, keeps those that are open, and answers node 0's requests."""

    def __init__(self, loop: EventLoop, send: Callable[[FromNode], None], report: Callable[[str], object]) -> None:
        """``send`` sends a control message to node 0; ``report`` gets a message on each bug."""
        self._loop, self._send, self._report = loop, send, report
        self._open: dict[tuple[int, str], tuple[Callable[[RpcReply], object], Timer]] = {}  # by serial and kind
        self._serial = 0
        self.handlers: dict[str, Handler] = {}  # by kind: called in place of ``Kind.answer``

    def request(self, kind: str, payload: Any, timeout_s: float, on_reply: Callable[[RpcReply], None]) -> None:
        """Ask all nodes; ``on_reply`` gets each reply. The last one comes about ``timeout_s`` later at most.

        If ``on_reply`` raises, the exception is reported, and ``on_reply`` is not called again.
        """
        self._serial += 1
        late = RpcReply(self._serial, kind, silent_nodes=("node 0",))
        timer = self._loop.call_later(timeout_s + NODE_ZERO_MARGIN_S, partial(self.on_reply, late))
        isolated = Isolation(f"what gets the replies to the request {kind}", self._report)
        self._open[self._serial, kind] = isolated.guard(on_reply), timer
        self._send(RpcRequest(self._serial, kind, timeout_s, payload))

    def on_reply(self, message: RpcReply) -> None:
        if (key := (message.serial, message.kind)) not in self._open:
            return
        on_reply, timer = self._open[key]
        if message.is_last:
            timer.cancel()
            del self._open[key]
        on_reply(message)

    def on_request(self, ranks: NodeRanks, message: RpcRequest, kind: Kind) -> None:
        """Answer a request of node 0 about this node's ranks; without an answer, node 0 waits until its timeout."""

        def send_reply(payload: Any, is_last: bool) -> None:
            self._send(RpcReply(message.serial, message.kind, payload, is_last))

        handler = self.handlers.get(message.kind) or kind.answer
        isolated = IsolatedLoop(self._loop, f"the answer to the request {message.kind}", self._report)
        isolated.guard(handler)(isolated, ranks, message, send_reply)
