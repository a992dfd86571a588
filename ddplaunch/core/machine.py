"""Base classes of the state machines of the core: an event and its time go in, commands come out.

- A machine reads no clock, file, socket or process, starts no timer, and nothing calls it back. Its owner feeds events,
  executes the commands in their order, and feeds ``DeadlineDue`` at the moment of ``wake_at``.
- A table drives its phase: which steps are possible in a phase, and where each step leads. No other code sets a phase.
  A step that the table does not have is a bug of the machine: ``InvalidStep``.
- Whatever a machine raises carries its latest events, which the report of a bug shows. They contain only numbers
  and names of types: a text may be secret. A ``ProtocolError`` is the fault of a peer, and carries no events.

The rules of each machine, in plain words, are the first page of its file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, TypeVar

from msgspec import Struct

from ddplaunch.base.errors import add_note
from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.deadlines import Now
from ddplaunch.core.messages import Message

P = TypeVar("P", bound=Enum)
S = TypeVar("S", bound=Enum)

Transitions = Mapping[P, Mapping[S, P]]
"""The table of a machine: in each phase, the possible steps, and the phase that each leads to."""

MAX_RECENT_EVENTS = 50
MAX_EVENT_CHARS = 300


class MachineEvent(Struct, frozen=True):
    """Base class of the input of a state machine. (``core/events.py`` has the events for observers and logs.)"""

    is_recorded: ClassVar[bool] = True
    """Whether the report of a bug lists this event among the latest ones of the machine."""


class MessageReceived(MachineEvent, frozen=True):
    """A node has sent a control message; its payload, if any, has been checked."""

    node_rank: int
    message: Message


class DeadlineDue(MachineEvent, frozen=True):
    """The time of ``Machine.wake_at`` has come: a deadline is due."""

    is_recorded = False  # the deadlines that are due are recorded instead


class Command(Struct, frozen=True):
    """Base class of commands, the output of a state machine: each is one effect."""


class Send(Command, frozen=True):
    """Send a control message to a node."""

    node_rank: int
    message: Message


class InvalidStep(Exception):
    """Raised when a state machine is to take a step that its phase does not allow: a bug."""


def next_phase(table: Transitions[P, S], phase: P, step: S) -> P:
    """Return the phase that a step leads to; InvalidStep if it is not possible now."""
    if (following := table[phase].get(step)) is None:
        raise InvalidStep(f"{step} in {phase}")
    return following


def describe_event(event: Struct) -> str:
    """Describe an event, or what it contains: types, numbers and names of constants, no text."""
    fields = []
    for name in event.__struct_fields__:
        value = getattr(event, name)
        kind = type(value)
        if kind is int or kind is bool or kind is float:
            fields.append(f"{name}={value}")
        elif kind is str or kind is tuple or value is None:
            continue
        elif isinstance(value, Struct):
            fields.append(describe_event(value))
        elif isinstance(value, int | Enum):
            fields.append(f"{name}={value}")
    return f"{type(event).__name__}({', '.join(fields)})"[:MAX_EVENT_CHARS]


class CommandCollector:
    """Base class of objects that make decisions: collects the resulting commands."""

    def __init__(self) -> None:
        self._commands: list[Command] = []

    def _do(self, *commands: Command) -> None:
        self._commands += commands

    def take_commands(self) -> list[Command]:
        """Remove and return the commands that were collected so far."""
        commands, self._commands = self._commands, []
        return commands


class Machine(CommandCollector, ABC):
    """Base class of the state machines."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: deque[tuple[float, str]] = deque(maxlen=MAX_RECENT_EVENTS)

    def on(self, event: MachineEvent, now: Now) -> list[Command]:
        """Handle an event; return what to do, in this order.

        If it raises, the commands that precede the error are returned with the next event.
        """
        if event.is_recorded:
            self._record(event, now)
        try:
            self._handle(event, now)
        except ProtocolError:
            raise
        except Exception as error:
            add_note(error, self._describe_recent(now))
            raise
        return self.take_commands()

    def _record(self, event: Struct, now: Now) -> None:
        """Add an event or a due deadline to the list of the latest ones."""
        self._recent.append((now.mono, describe_event(event)))

    def _describe_recent(self, now: Now) -> str:
        lines = [f"  {moment - now.mono:9.3f} s  {event}" for moment, event in self._recent]
        return "\n".join([f"the latest events of {type(self).__name__}:", *lines])

    @abstractmethod
    def _handle(self, event: MachineEvent, now: Now) -> None: ...

    @abstractmethod
    def wake_at(self) -> float | None:
        """The moment of the next deadline, on the monotonic clock; None without any."""
