"""Lets a node that cannot join notify the others, which would wait for it otherwise."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from msgspec.structs import replace

from ddplaunch.base.connection import Connection
from ddplaunch.base.errors import UsageError
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core import messages
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import JoinDeclined, JoinRefused, Message, NodeHello
from ddplaunch.core.net.coordinator_client import CoordinatorClient
from ddplaunch.core.net.listener import Listener
from ddplaunch.system.network.reserved_port import try_listen

DECLINE_TIMEOUT_S = 10.0  # to reach the others: when all nodes start at once, some are later
LINGER_S = 1.0  # for the last message to be delivered


def decline_to_join(
    config: JobConfig, node_rank: int, host: str, error: UsageError, listener_socket: socket.socket | None = None
) -> None:
    """Notify the job why this node cannot join; return when it knows, or after DECLINE_TIMEOUT_S.

    ``listener_socket`` listens on the control port, if this is node 0 and has opened it.
    """
    declined = JoinDeclined(node_rank, host, error.message, error.hint, config.run_id)
    if node_rank:
        _notify_node_zero(config, declined)
    else:
        _notify_other_nodes(config, declined, listener_socket)


def _notify_node_zero(config: JobConfig, declined: JoinDeclined) -> None:
    loop = EventLoop()
    replies: list[Message] = []

    def on_message(message: Message) -> None:
        if isinstance(message, messages.EndJob):
            replies.append(message)

    client = CoordinatorClient(loop, replace(config, join_timeout=DECLINE_TIMEOUT_S), declined, on_message)
    client.start()
    _run_until(loop, DECLINE_TIMEOUT_S + 1, lambda: bool(replies))
    client.close()
    _run_until(loop, LINGER_S, lambda: client.is_closed)


def _notify_other_nodes(config: JobConfig, declined: JoinDeclined, listener_socket: socket.socket | None) -> None:
    assert config.port is not None
    try:
        listener_socket = listener_socket or try_listen(config.port)
    except UsageError:
        return
    if listener_socket is None:
        return  # another process listens there, which may be node 0
    loop = EventLoop()
    refused = JoinRefused(declined.text, declined.hint)
    informed: list[Connection[Message]] = []

    def on_peer(connection: Connection[Message], hello: NodeHello | JoinDeclined, proof: str | None) -> None:
        informed.append(connection)
        listener.refuse(connection, refused)

    listener = Listener(loop, listener_socket, config, 1, on_peer)
    _run_until(loop, DECLINE_TIMEOUT_S, lambda: len(informed) >= config.max_nodes - 1)
    _run_until(loop, LINGER_S, lambda: not any(connection.is_open for connection in informed))
    for connection in listener.close():
        connection.close()


def _run_until(loop: EventLoop, seconds: float, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    loop.call_later(seconds, lambda: None)
    while not done() and time.monotonic() < deadline:
        loop.run_once()
