"""What ``LinkMachine`` decides: its output. ``CoordinatorClient`` executes each command."""

from __future__ import annotations

from ddplaunch.core.machine import Command
from ddplaunch.core.machine import Send as Send
from ddplaunch.core.messages import Message
from ddplaunch.system.network.addresses import SocketAddress


class Resolve(Command, frozen=True):
    """Look up the addresses of node 0; the reply is ``Resolved``."""


class Connect(Command, frozen=True):
    """Open a socket to an address of node 0; the reply is ``Connected`` or ``ConnectFailed``."""

    number: int
    address: SocketAddress


class StopConnecting(Command, frozen=True):
    """Close the sockets that are not connected yet."""


class AwaitReply(Command, frozen=True):
    """Accept the reply to the hello, and nothing else."""


class BeginHeartbeats(Command, frozen=True):
    """This node has joined: accept all messages of node 0, send heartbeats, and expect those of node 0."""

    timeout_s: float


class Disconnect(Command, frozen=True):
    """Close the connection, if there is one, and end the heartbeats."""


class Deliver(Command, frozen=True):
    """Deliver a message to this node: from node 0, or from this node itself."""

    message: Message
