"""The events of a job on one node, as frozen data; the ``Observers`` that receive them; their JSON form.

Each event is emitted once, to every observer; observers do not know each other. Some control messages of node 0 are
events themselves.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.types import (
    Count,
    ExitCode,
    ExitStatus,
    Name,
    NonNegativeFloat,
    Path,
    Pid,
    Signal,
    Size,
    Text,
    TextLine,
    Timestamp,
)
from ddplaunch.core import messages
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.isolation import Isolation
from ddplaunch.core.messages import AttemptEnded as AttemptEnded
from ddplaunch.core.messages import JobStalled as JobStalled
from ddplaunch.core.messages import NodeLost as NodeLost
from ddplaunch.core.messages import RanksInspected as RanksInspected
from ddplaunch.core.messages import Restarting as Restarting
from ddplaunch.system.plan.plan import Plan


class StoredEvent(Struct, frozen=True):
    """Base class of stored events. ``event_name`` gives their names in the file, and those of messages stored there."""

    in_history: ClassVar[bool] = True
    """Whether the history has the event, too; events.jsonl has all events."""


class AttemptPlanned(Struct, frozen=True):
    """The ranks of an attempt are known; ``plan`` becomes plan.json."""

    plan: Plan
    attempt: Count


class AttemptStarted(StoredEvent, frozen=True):
    """The stored form of ``AttemptPlanned``; ``ranks``: rank and host of each rank of this node."""

    attempt: Count
    node_rank: Count
    nnodes: Count
    world_size: Count
    ranks: tuple[tuple[Count, Name], ...]

    @classmethod
    def from_planned(cls, planned: AttemptPlanned) -> AttemptStarted:
        plan = planned.plan
        ranks = tuple((rank.rank, rank.host or "") for rank in plan.local_ranks)
        return cls(planned.attempt, plan.node_rank, plan.nnodes, plan.world_size, ranks)


class AttemptsOmitted(StoredEvent, frozen=True):
    """This many attempts are missing in the stored events, just before this event."""

    attempts: Count


class ZygoteReady(StoredEvent, frozen=True):
    """The zygote can start ranks."""

    in_history = False

    forks: bool
    unsafe: TextLine | None  # why it does not fork
    seconds: NonNegativeFloat  # duration of its imports
    modules: tuple[TextLine, ...] = ()  # preloaded for all ranks
    because: TextLine | None = None  # why no others could be preloaded
    excluded: tuple[tuple[TextLine, TextLine], ...] = ()  # modules that each rank imports itself, and why
    cold: TextLine | None = None  # why no zygote from before the run was used, if one was requested


class RankStarted(StoredEvent, frozen=True):
    rank: Count
    pid: Pid
    attempt: Count


class ImportMismatch(StoredEvent, frozen=True):
    """An import of a rank's program did not fit the modules that the zygote had preloaded."""

    rank: Count
    outcome: TextLine  # "restarts" as a new interpreter, "continues" with what was preloaded, or "ends"
    module: TextLine  # that the program imported
    differs: TextLine  # what differed, with the line of the import
    attempt: Count


class RankStartFailed(StoredEvent, frozen=True):
    rank: Count
    errno: Count  # of the failed fork
    attempt: Count


class RankExited(StoredEvent, frozen=True):
    rank: Count
    pid: Pid
    code: ExitStatus  # -N for signal N
    attempt: Count
    peak_memory: Size = 0  # bytes, the maximum of it and its children; 0 if the zygote was lost
    user_cpu: NonNegativeFloat = 0.0  # seconds, of it and its children
    system_cpu: NonNegativeFloat = 0.0


class ProgramsStarting(StoredEvent, frozen=True):
    """All nodes have joined, and the programs beside the ranks start; the ranks wait for them."""

    in_history: ClassVar[bool] = False

    attempt: Count
    has_ranks: bool  # whether this node gets ranks


class ProgramPlanned(StoredEvent, frozen=True):
    """A program of the job other than the ranks will be started: its GPUs and address."""

    program: TextLine
    kind: TextLine  # "main", "service" or "sidecar"
    gpus: TextLine  # "0-3"; "" for none
    address: TextLine  # "" without a port


class ProgramStarted(StoredEvent, frozen=True):
    """The process of a program other than the ranks has started."""

    program: TextLine
    pid: Pid
    attempt: Count


class ProgramReady(StoredEvent, frozen=True):
    program: TextLine
    seconds: NonNegativeFloat  # since it has its process
    attempt: Count


class ProgramExited(StoredEvent, frozen=True):
    program: TextLine
    code: ExitStatus  # -N for signal N
    attempt: Count
    peak_memory: Size = 0  # bytes, the maximum of it and its children; 0 if its zygote was lost
    quiet: NonNegativeFloat | None = None  # seconds since its last output


class SignalReceived(StoredEvent, frozen=True):
    number: Signal  # received by the launcher


class JobPreempted(StoredEvent, frozen=True):
    """The scheduler preempts the job; the ranks are notified."""


class AttemptSwept(StoredEvent, frozen=True):
    """The attempt's leftover processes (``found``) were killed, except those that cannot be killed (``stuck``)."""

    found: tuple[TextLine, ...]
    stuck: tuple[TextLine, ...]


class NoteAdded(StoredEvent, frozen=True):
    """A note for the user about the job."""

    text: TextLine


class FirstCollective(StoredEvent, frozen=True):
    """Every rank of this node has entered its first collective of this attempt; ``moment``: when the last rank did."""

    moment: Timestamp


class StallEnded(StoredEvent, frozen=True):
    """The stalled ranks make progress again."""


class CheckpointFound(StoredEvent, frozen=True):
    """The newest complete checkpoint that ``--checkpoint`` found at the attempt's end, with its time; None: none."""

    path: Path | None
    moment: Timestamp | None


class JobEnded(StoredEvent, frozen=True):
    """The job has ended: its exit code, the failure that decided it, and an additional remark."""

    code: ExitCode
    verdict: FailureReport | None
    remark: Text | None = None


Event = StoredEvent | AttemptPlanned | AttemptEnded | Restarting | RanksInspected | JobStalled | NodeLost
"""Features may have stored events of their own."""

_OF_MESSAGES = (AttemptEnded, Restarting, RanksInspected, JobStalled, NodeLost)
_STORED: tuple[type[Any], ...] = (*StoredEvent.__subclasses__(), *_OF_MESSAGES)


def event_name(kind: type[Any]) -> str:
    """Return the name of an event type in events.jsonl and the history, from its class: "rank_started"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


EVENT_TYPES: Mapping[str, type[Any]] = {event_name(kind): kind for kind in _STORED}
"""The events of the core in events.jsonl and the history, by their names there; each with all its fields."""

_FORMER_NAMES = {
    "begun": "attempt_started", "left_out": "attempts_omitted", "ready": "zygote_ready", "started": "rank_started",
    "mismatch": "import_mismatch", "failed_to_start": "rank_start_failed", "exited": "rank_exited",
    "signal": "signal_received", "preempt": "job_preempted", "swept": "attempt_swept", "note": "note_added",
    "went_on": "stall_ended", "checkpoint": "checkpoint_found", "ended": "job_ended", "restart": "restarting",
    "inspected": "ranks_inspected", "stalled": "job_stalled",
}  # fmt: skip


def find_event_type(name: str) -> type[Any]:
    """Return the type of a stored event, also by the name that older records have for it; KeyError if unknown."""
    return EVENT_TYPES[_FORMER_NAMES.get(name, name)]


_FIELD_NAMES = {"verdict": "failure"}
"""The fields whose name in the file differs, with that name; older records have the field's own name."""


def fields_of_event(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file has of an event, by the names of the event's fields (``_FIELD_NAMES``)."""
    return {**stored, **{name: stored[other] for name, other in _FIELD_NAMES.items() if other in stored}}


class Observer(Protocol):
    """Receives every event, in order, in the launcher's own thread; must not block."""

    def observe(self, event: Event) -> None: ...


class Observers:
    """All observers of a job. An observer that is added later gets later events only; one that raises gets no more."""

    def __init__(self, *first: Observer, report: Callable[[str], object]) -> None:
        """``report`` gets a message with the traceback for each observer that raises."""
        self._report = report
        self._all: list[Callable[[Event], object]] = []
        self._queue = deque[Event]()  # the event that is being delivered, and those that observers emit meanwhile
        for observer in first:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        self._all.append(Isolation(type(observer).__name__, self._report).guard(observer.observe))

    def emit(self, event: Event) -> None:
        """Deliver an event to all observers, and then, in the same call, the events that observers emit meanwhile."""
        self._queue.append(event)
        if len(self._queue) > 1:
            return
        while self._queue:
            for observe in [*self._all]:
                observe(self._queue[0])
            self._queue.popleft()


def event_to_json(event: Event, moment: float, **more: float) -> bytes:
    """Format an event as a line of JSON, with its time ``moment`` (seconds since the epoch) and ``more`` fields."""
    stored: Any = AttemptStarted.from_planned(event) if isinstance(event, AttemptPlanned) else event
    if isinstance(stored, Restarting) and stored.verdict:
        stored = replace(stored, verdict=replace(stored.verdict, others=()))
    fields = {_FIELD_NAMES.get(name, name): getattr(stored, name) for name in stored.__struct_fields__}
    record = {"time": moment, **more, "event": event_name(type(stored)), **fields}
    return json.dumps(record, default=lambda each: each.to_json()).encode() + b"\n"


def event_from_message(message: messages.Message) -> Event | None:
    """Return the event that a control message of node 0 reports; None if the message is a command."""
    match message:
        case AttemptEnded() | Restarting() | JobStalled() | NodeLost() | RanksInspected():
            return message
        case messages.NoteMessage(text=text):
            return NoteAdded(text)
        case messages.ProgressResumed():
            return StallEnded()
    return None
