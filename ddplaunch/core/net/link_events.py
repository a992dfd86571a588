"""What happens to a node's connection to node 0: the input of ``LinkMachine``."""

from __future__ import annotations

from ddplaunch.core.machine import DeadlineDue as DeadlineDue
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.machine import MessageReceived as MessageReceived
from ddplaunch.core.messages import Message
from ddplaunch.system.network.addresses import SocketAddress


class Start(MachineEvent, frozen=True):
    """The launcher is ready: the first event."""


class Resolved(MachineEvent, frozen=True):
    """Reply to ``Resolve``: the addresses of node 0; ``error``: of getaddrinfo(3), if there are none."""

    addresses: tuple[SocketAddress, ...]
    error: int | None = None


class Connected(MachineEvent, frozen=True):
    """Reply to ``Connect``; ``nonce`` is a new one, for node 0's proof."""

    number: int
    nonce: str


class ConnectFailed(MachineEvent, frozen=True):
    """Reply to ``Connect``: it failed with this errno (None: no socket could be made), ``at_once`` or later."""

    number: int
    code: int | None
    at_once: bool = False


class ConnectionLost(MachineEvent, frozen=True):
    """The connection is lost, after ``Connected``."""

    reason: str


class MessagePosted(MachineEvent, frozen=True):
    """This node has a message to node 0."""

    message: Message


class Closed(MachineEvent, frozen=True):
    """The launcher ends."""
