"""A node that cannot take part tells the others, which would wait for it otherwise."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ddplaunch.control import messages
from ddplaunch.control.listener import Listener
from ddplaunch.control.member import CoordinatorClient
from ddplaunch.control.messages import JoinDeclined, JoinRefused, Message, NodeHello
from ddplaunch.control.port import try_listen
from ddplaunch.control.rules import JobConfig
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError
from ddplaunch.loop import EventLoop
from ddplaunch.wire.connection import Connection

DECLINE_TIMEOUT_S = 10.0  # seconds in which the others must be reached: when all nodes start at once, some are up later
LINGER_S = 1.0  # seconds in which our last message must have been read


def decline_to_join(
    config: JobConfig, node_rank: int, host: str, error: UsageError, listener_socket: socket.socket | None = None
) -> None:
    """Tell the job why this node takes no part; returns when it knows, or after DECLINE_TIMEOUT_S.

    ``listener_socket`` is on the control port already, if this is node 0 and got that far.
    """
    declined = JoinDeclined(node_rank, host, error.message, error.hint, config.run_id)
    if node_rank:
        _notify_node_zero(config, declined)
    else:
        _notify_other_nodes(config, declined, listener_socket)


def _notify_node_zero(rules: JobConfig, declined: JoinDeclined) -> None:
    loop = EventLoop()
    over: list[Message] = []

    def hear(message: Message) -> None:
        if isinstance(message, messages.EndJob):
            over.append(message)

    member = CoordinatorClient(loop, replace(rules, join_timeout=DECLINE_TIMEOUT_S), declined, hear)
    member.start()
    _run_until(loop, DECLINE_TIMEOUT_S + 1, lambda: bool(over))
    member.close()
    _run_until(loop, LINGER_S, lambda: member.is_closed)


def _notify_other_nodes(rules: JobConfig, declined: JoinDeclined, listening: socket.socket | None) -> None:
    assert rules.port is not None
    try:
        listening = listening or try_listen(rules.port)
    except UsageError:
        return
    if listening is None:
        return  # another process listens there, which may be node 0
    loop = EventLoop()
    refused = JoinRefused(declined.text, declined.hint)
    informed: list[Connection[Message]] = []

    def meet(connection: Connection[Message], hello: NodeHello | JoinDeclined, proof: str | None) -> None:
        informed.append(connection)
        listener.refuse(connection, refused)

    listener = Listener(loop, listening, rules, 1, meet)
    _run_until(loop, DECLINE_TIMEOUT_S, lambda: len(informed) >= rules.max_nodes - 1)
    _run_until(loop, LINGER_S, lambda: not any(connection.is_open for connection in informed))
    for connection in listener.close():
        connection.close()


def _run_until(loop: EventLoop, seconds: float, done: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    loop.call_later(seconds, lambda: None)
    while not done() and time.monotonic() < until:
        loop.run_once()
