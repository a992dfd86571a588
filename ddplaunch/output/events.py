"""What happens to one node's share of a job: each thing is frozen, and emitted once.

Each of the ``Observers`` that the supervisor is given hears of each; none knows anything of another. Of what node 0
tells all nodes some are events as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control import messages
from ddplaunch.control.failure import FailureReport
from ddplaunch.control.messages import JobStalled as JobStalled
from ddplaunch.control.messages import NodeLost as NodeLost
from ddplaunch.control.messages import Restarting as Restarting
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.output.isolation import describe_bug
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from typing import Any, Protocol

    from ddplaunch.wire.bounds import (
        Count,
        ExitCode,
        ExitStatus,
        Name,
        NonNegativeFloat,
        Path,
        Pid,
        Signal,
        Size,
        TextLine,
        Timestamp,
    )
else:
    Protocol = object


@dataclass(frozen=True)
class AttemptPlanned:
    """The ranks of an attempt are known: plan.json is the plan."""

    plan: Plan
    attempt: Count


@dataclass(frozen=True)
class AttemptStarted:
    """What is kept of ``AttemptPlanned``; of each rank of this node its number and host."""

    attempt: Count
    node_rank: Count
    nnodes: Count
    world_size: Count
    ranks: tuple[tuple[Count, Name], ...]

    @classmethod
    def of(cls, planned: AttemptPlanned) -> AttemptStarted:
        plan = planned.plan
        ranks = tuple((rank.rank, rank.host or "") for rank in plan.local_ranks)
        return cls(planned.attempt, plan.node_rank, plan.nnodes, plan.world_size, ranks)


@dataclass(frozen=True)
class AttemptsOmitted:
    """So many attempts, the last before this line, are not in the file."""

    attempts: Count


@dataclass(frozen=True)
class ZygoteReady:
    """The zygote can start ranks; ``unsafe`` says why it does not fork, ``seconds`` how long its imports took."""

    forks: bool
    unsafe: TextLine | None
    seconds: NonNegativeFloat
    modules: tuple[TextLine, ...] = ()  # what it has imported for all ranks
    because: TextLine | None = None  # why nothing else could be
    excluded: tuple[tuple[TextLine, TextLine], ...] = ()  # what each rank imports itself, and why
    cold: TextLine | None = None  # why it did not come of a warm one, where that was asked for


@dataclass(frozen=True)
class RankStarted:
    rank: Count
    pid: Pid
    attempt: Count


@dataclass(frozen=True)
class RankStartFailed:
    rank: Count
    errno: Count  # why it got no process
    attempt: Count


@dataclass(frozen=True)
class RankExited:
    rank: Count
    pid: Pid
    code: ExitStatus  # -N for signal N
    attempt: Count
    peak_memory: Size = 0  # bytes, of the largest of it and its children; 0 where the zygote was lost
    user_cpu: NonNegativeFloat = 0.0  # seconds, of it and its children
    system_cpu: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class SignalReceived:
    number: Signal  # of the signal that has come to the launcher


@dataclass(frozen=True)
class JobPreempted:
    """The scheduler wants the machines back, and the ranks are told."""


@dataclass(frozen=True)
class AttemptSwept:
    """Nothing of the attempt is left: ``found`` was ended, ``stuck`` cannot be killed."""

    found: tuple[TextLine, ...]
    stuck: tuple[TextLine, ...]


@dataclass(frozen=True)
class RanksInspected:
    """What all ranks of the job were doing when the attempt was to be stopped; node 0 alone hears it."""

    inspection: diagnosis.inspection.Inspection


@dataclass(frozen=True)
class NoteAdded:
    """Something that people should know of the job."""

    text: TextLine


@dataclass(frozen=True)
class FirstCollective:
    """Every rank here has entered a collective of this attempt; ``moment``: when the last of them did."""

    moment: Timestamp


@dataclass(frozen=True)
class StallEnded:
    """The ranks that had stalled work again."""


@dataclass(frozen=True)
class CheckpointFound:
    """What ``--checkpoint`` found as the attempt ended: the newest whole one, and since when it is; None for none."""

    path: Path | None
    moment: Timestamp | None


@dataclass(frozen=True)
class JobEnded:
    """The job is over; ``code`` is the exit code, ``verdict`` the failure that decided it, ``remark`` a last word."""

    code: ExitCode
    verdict: FailureReport | None
    remark: TextLine | None = None


@dataclass(frozen=True)
class SidecarStarted:
    sidecar: TextLine
    pid: Pid


@dataclass(frozen=True)
class SidecarListening:
    sidecar: TextLine
    url: TextLine  # where it has said that it answers


@dataclass(frozen=True)
class SidecarExited:
    sidecar: TextLine
    code: ExitStatus  # -N for signal N


Event = (
    AttemptPlanned
    | ZygoteReady
    | RankStarted
    | RankStartFailed
    | RankExited
    | SignalReceived
    | JobPreempted
    | AttemptSwept
    | Restarting
    | RanksInspected
    | NoteAdded
    | FirstCollective
    | JobStalled
    | StallEnded
    | NodeLost
    | CheckpointFound
    | JobEnded
    | SidecarStarted
    | SidecarListening
    | SidecarExited
)

EVENT_TYPES: Mapping[str, type[Any]] = {
    "begun": AttemptStarted,
    "ready": ZygoteReady,
    "started": RankStarted,
    "failed_to_start": RankStartFailed,
    "exited": RankExited,
    "signal": SignalReceived,
    "preempt": JobPreempted,
    "swept": AttemptSwept,
    "restart": Restarting,
    "inspected": RanksInspected,
    "note": NoteAdded,
    "first_collective": FirstCollective,
    "stalled": JobStalled,
    "went_on": StallEnded,
    "node_lost": NodeLost,
    "checkpoint": CheckpointFound,
    "ended": JobEnded,
    "sidecar_started": SidecarStarted,
    "sidecar_answers": SidecarListening,
    "sidecar_exited": SidecarExited,
    "left_out": AttemptsOmitted,
}
"""What events.jsonl and the history hold, by their names there: each with all its fields."""

_EVENT_NAMES = {kind: name for name, kind in EVENT_TYPES.items()}


class Observer(Protocol):
    """Gets every event, in order, in the launcher's own thread; it may take no time."""

    def observe(self, event: Event) -> None: ...


class Observers:
    """All observers of a job; one that is added later gets what follows, one that raises gets no more."""

    def __init__(self, *first: Observer, report: Callable[[str], object]) -> None:
        """``report`` gets a message, with the traceback, of each observer that has raised."""
        self._all, self._report = [*first], report

    def add(self, observer: Observer) -> None:
        self._all.append(observer)

    def emit(self, event: Event) -> None:
        for observer in [*self._all]:
            try:
                observer.observe(event)
            except Exception as error:
                self._all.remove(observer)
                with suppress(Exception):  # it may be the screen that fails
                    self._report(describe_bug(type(observer).__name__, error))


def event_to_json(event: Event | AttemptsOmitted, moment: float, **more: float) -> bytes:
    """An event as a line of JSON, with ``moment``, in seconds since the epoch, and ``more``; tuples are lists there."""
    kept: Any = AttemptStarted.of(event) if isinstance(event, AttemptPlanned) else event
    if isinstance(kept, Restarting) and kept.verdict:
        kept = replace(kept, verdict=replace(kept.verdict, others=()))
    fields = {name: getattr(kept, name) for name in kept.__match_args__}
    said = {"time": moment, **more, "event": _EVENT_NAMES[type(kept)], **fields}
    return json.dumps(said, default=lambda each: each.to_json()).encode() + b"\n"


def event_from_message(message: messages.Message) -> Event | None:
    """What node 0 tells this node, as an event; None where it is an order."""
    match message:
        case Restarting() | JobStalled() | NodeLost():
            return message
        case messages.InspectReply(serial=0, inspection=inspection):
            return RanksInspected(inspection)
        case messages.NoteMessage(text=text):
            return NoteAdded(text)
        case messages.ProgressResumed():
            return StallEnded()
    return None
