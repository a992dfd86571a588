"""What happens to a job: the input of ``JobMachine``. (``core/events.py`` has what observers and the logs get.)"""

from __future__ import annotations

from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.machine import DeadlineDue as DeadlineDue
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.machine import MessageReceived as MessageReceived
from ddplaunch.core.messages import JoinDeclined, NodeHello


class Start(MachineEvent, frozen=True):
    """The launcher of node 0 is ready: the first event."""


class HelloReceived(MachineEvent, frozen=True):
    """A node wants to join, or cannot."""

    connection: int  # names its connection in the reply, ``Accept`` or ``Refuse``
    hello: NodeHello | JoinDeclined


class ConnectionLost(MachineEvent, frozen=True):
    """A node's connection is lost, or its heartbeats stopped ``silent_s`` seconds ago."""

    node_rank: int
    reason: str
    silent_s: float = 0.0


class ClockMeasured(MachineEvent, frozen=True):
    """A heartbeat has shown how far a node's clock is ahead."""

    is_recorded = False  # there are many, and they change no decision

    node_rank: int
    offset: ClockOffset
