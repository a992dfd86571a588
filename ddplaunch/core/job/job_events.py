"""What the job's machine gets and returns: events, commands, and what its parts share while it handles one event."""

from __future__ import annotations

from typing import NamedTuple

from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.deadlines import Deadlines, Now
from ddplaunch.core.messages import FromNode, JoinDeclined, JoinRefused, Message, NodeHello


class Start(NamedTuple):
    """The launcher of node 0 is ready: the first event."""


class HelloReceived(NamedTuple):
    """A node wants to join, or cannot."""

    connection: int  # names its connection in the reply, ``Accept`` or ``Refuse``
    hello: NodeHello | JoinDeclined


class MessageReceived(NamedTuple):
    """A node has sent a message; its payload, if any, has been checked."""

    node_rank: int
    message: FromNode


class ConnectionLost(NamedTuple):
    """A node's connection is lost, or its heartbeats stopped ``silent_s`` seconds ago."""

    node_rank: int
    reason: str
    silent_s: float = 0.0


class ClockMeasured(NamedTuple):
    """A heartbeat has shown how far a node's clock is ahead."""

    node_rank: int
    offset: ClockOffset


class Woken(NamedTuple):
    """The moment of ``JobMachine.wake_at`` has come."""


Event = Start | HelloReceived | MessageReceived | ConnectionLost | ClockMeasured | Woken


class Accept(NamedTuple):
    """Let the node of this connection join; ``hello`` has its node rank. ``late``: ranks have started before."""

    connection: int
    hello: NodeHello
    late: bool


class Refuse(NamedTuple):
    """Send why the node of this connection may not join, then close it."""

    connection: int
    refusal: JoinRefused


class Send(NamedTuple):
    """Send a control message to a node."""

    node_rank: int
    message: Message


class Disconnect(NamedTuple):
    """Close a node's connection; no ``ConnectionLost`` follows."""

    node_rank: int


Command = Accept | Refuse | Send | Disconnect


class Turn:
    """The handling of one event: its moment, and the commands so far; and the deadlines, which outlast it."""

    def __init__(self) -> None:
        self.now = Now(0.0, 0.0)
        self.commands: list[Command] = []
        self.deadlines = Deadlines[str]()

    def set_deadline(self, name: str, seconds: float) -> None:
        """Set a deadline from now on, or move it."""
        self.deadlines.set(name, self.now.mono + seconds)

    def take_commands(self) -> list[Command]:
        """Remove and return the commands so far."""
        commands, self.commands = self.commands, []
        return commands
