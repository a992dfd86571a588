"""What the machines of the core have in common: an event goes in, with its moment, and commands come out.

A machine reads no clock, file, socket or process, starts no timer, and nothing calls it back. Its owner feeds events,
executes the commands in their order, and feeds ``DeadlineDue`` at the moment of ``wake_at``. The rules of a machine are
the first page of its file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from msgspec import Struct

from ddplaunch.core.deadlines import Now
from ddplaunch.core.messages import Message


class MachineEvent(Struct, frozen=True):
    """Something has happened: the input of a machine. (``core/events.py`` has what observers and the logs get.)"""


class MessageReceived(MachineEvent, frozen=True):
    """A node has sent a control message; its payload, if any, has been checked."""

    node_rank: int
    message: Message


class DeadlineDue(MachineEvent, frozen=True):
    """The moment of ``Machine.wake_at`` has come."""


class Command(Struct, frozen=True):
    """One effect: the output of a machine."""


class Send(Command, frozen=True):
    """Send a control message to a node."""

    node_rank: int
    message: Message


class Decider:
    """Collects the commands that follow from what it is deciding."""

    def __init__(self) -> None:
        self._commands: list[Command] = []

    def _do(self, *commands: Command) -> None:
        self._commands += commands

    def take_commands(self) -> list[Command]:
        """Remove and return the commands so far."""
        commands, self._commands = self._commands, []
        return commands


class Machine(Decider, ABC):
    """Base class of the machines."""

    def on(self, event: MachineEvent, now: Now) -> list[Command]:
        """Handle an event; return what to do, in this order.

        If it raises, the commands that precede the error are returned with the next event.
        """
        self._handle(event, now)
        return self.take_commands()

    @abstractmethod
    def _handle(self, event: MachineEvent, now: Now) -> None: ...

    @abstractmethod
    def wake_at(self) -> float | None:
        """The moment of the next deadline, on the monotonic clock; None without any."""
