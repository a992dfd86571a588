"""What ``JobMachine`` decides: the output of the machine. ``CoordinatorServer`` executes each command."""

from __future__ import annotations

from ddplaunch.core.machine import Command
from ddplaunch.core.machine import Send as Send
from ddplaunch.core.messages import JoinRefused, NodeHello


class Accept(Command, frozen=True):
    """Let the node of this connection join; ``hello`` has its node rank. ``late``: ranks have started before."""

    connection: int
    hello: NodeHello
    late: bool


class Refuse(Command, frozen=True):
    """Send why the node of this connection may not join, then close it."""

    connection: int
    refusal: JoinRefused


class Disconnect(Command, frozen=True):
    """Close a node's connection; no ``ConnectionLost`` follows."""

    node_rank: int
