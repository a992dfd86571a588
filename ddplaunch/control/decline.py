"""A node that cannot take part tells the others, which would wait for it otherwise."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ddplaunch.control import messages
from ddplaunch.control.listener import Listener
from ddplaunch.control.member import Member
from ddplaunch.control.messages import Declined, Hello, Message, Refused
from ddplaunch.control.port import claim
from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError
from ddplaunch.loop import Loop
from ddplaunch.wire.connection import Connection

PATIENCE = 10.0  # seconds in which the others must be reached: when all nodes start at once, some are up later
PARTING = 1.0  # seconds in which our last message must have been read


def decline(rules: Rules, node_rank: int, host: str, error: UsageError, listening: socket.socket | None = None) -> None:
    """Tell the job why this node takes no part; returns when it knows, or after PATIENCE.

    ``listening`` is on the control port already, if this is node 0 and got that far.
    """
    declined = Declined(node_rank, host, error.message, error.hint, rules.run_id)
    if node_rank:
        _tell_node_zero(rules, declined)
    else:
        _tell_others(rules, declined, listening)


def _tell_node_zero(rules: Rules, declined: Declined) -> None:
    loop = Loop()
    over: list[Message] = []

    def hear(message: Message) -> None:
        if isinstance(message, messages.End):
            over.append(message)

    member = Member(loop, replace(rules, join_timeout=PATIENCE), declined, hear)
    member.begin()
    _step(loop, PATIENCE + 1, lambda: bool(over))
    member.close()
    _step(loop, PARTING, lambda: member.closed)


def _tell_others(rules: Rules, declined: Declined, listening: socket.socket | None) -> None:
    assert rules.port is not None
    try:
        listening = listening or claim(rules.port)
    except UsageError:
        return
    if listening is None:
        return  # another process listens there, which may be node 0
    loop = Loop()
    refused = Refused(declined.says, declined.hint)
    informed: list[Connection[Message]] = []

    def meet(connection: Connection[Message], hello: Hello | Declined, proof: str | None) -> None:
        informed.append(connection)
        listener.dismiss(connection, refused)

    listener = Listener(loop, listening, rules, 1, meet)
    _step(loop, PATIENCE, lambda: len(informed) >= rules.max_nodes - 1)
    _step(loop, PARTING, lambda: not any(connection.open for connection in informed))
    for connection in listener.close():
        connection.close()


def _step(loop: Loop, seconds: float, done: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    loop.after(seconds, lambda: None)
    while not done() and time.monotonic() < until:
        loop.step()
