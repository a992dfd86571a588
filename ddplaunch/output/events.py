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
from ddplaunch.control.failure import Verdict
from ddplaunch.control.messages import NodeLost as NodeLost
from ddplaunch.control.messages import Restarting as Restarting
from ddplaunch.control.messages import Stalled as Stalled
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.output.isolation import describe_bug
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from typing import Any, Protocol

    from ddplaunch.wire.bounds import (
        Amount,
        Count,
        EndCode,
        ExitCode,
        Line,
        Moment,
        Name,
        Path,
        Pid,
        Signal,
        Size,
    )
else:
    Protocol = object


@dataclass(frozen=True)
class Planned:
    """The ranks of an attempt are known: plan.json is the plan."""

    plan: Plan
    attempt: Count


@dataclass(frozen=True)
class Begun:
    """What is kept of ``Planned``; of each rank of this node its number and host."""

    attempt: Count
    node_rank: Count
    nnodes: Count
    world_size: Count
    ranks: tuple[tuple[Count, Name], ...]

    @classmethod
    def of(cls, planned: Planned) -> Begun:
        plan = planned.plan
        ranks = tuple((rank.rank, rank.host or "") for rank in plan.local_ranks)
        return cls(planned.attempt, plan.node_rank, plan.nnodes, plan.world_size, ranks)


@dataclass(frozen=True)
class LeftOut:
    """So many attempts, the last before this line, are not in the file."""

    attempts: Count


@dataclass(frozen=True)
class Ready:
    """The zygote can start ranks; ``unsafe`` says why it does not fork, ``seconds`` how long its imports took."""

    forks: bool
    unsafe: Line | None
    seconds: Amount
    modules: tuple[Line, ...] = ()  # what it has imported for all ranks
    because: Line | None = None  # why nothing else could be
    excluded: tuple[tuple[Line, Line], ...] = ()  # what each rank imports itself, and why
    cold: Line | None = None  # why it did not come of a warm one, where that was asked for


@dataclass(frozen=True)
class Started:
    rank: Count
    pid: Pid
    attempt: Count


@dataclass(frozen=True)
class FailedToStart:
    rank: Count
    errno: Count  # why it got no process
    attempt: Count


@dataclass(frozen=True)
class Exited:
    rank: Count
    pid: Pid
    code: EndCode  # -N for signal N
    attempt: Count
    peak_memory: Size = 0  # bytes, of the largest of it and its children; 0 where the zygote was lost
    user_cpu: Amount = 0.0  # seconds, of it and its children
    system_cpu: Amount = 0.0


@dataclass(frozen=True)
class Signalled:
    number: Signal  # of the signal that has come to the launcher


@dataclass(frozen=True)
class Preempted:
    """The scheduler wants the machines back, and the ranks are told."""


@dataclass(frozen=True)
class Swept:
    """Nothing of the attempt is left: ``found`` was ended, ``stuck`` cannot be killed."""

    found: tuple[Line, ...]
    stuck: tuple[Line, ...]


@dataclass(frozen=True)
class RanksInspected:
    """What all ranks of the job were doing when the attempt was to be stopped; node 0 alone hears it."""

    inspection: diagnosis.inspection.Inspection


@dataclass(frozen=True)
class Noted:
    """Something that people should know of the job."""

    text: Line


@dataclass(frozen=True)
class FirstCollective:
    """Every rank here has entered a collective of this attempt; ``moment``: when the last of them did."""

    moment: Moment


@dataclass(frozen=True)
class WentOn:
    """The ranks that had stalled work again."""


@dataclass(frozen=True)
class LastCheckpoint:
    """What ``--checkpoint`` found as the attempt ended: the newest whole one, and since when it is; None for none."""

    path: Path | None
    moment: Moment | None


@dataclass(frozen=True)
class Ended:
    """The job is over; ``code`` is the exit code, ``verdict`` the failure that decided it, ``remark`` a last word."""

    code: ExitCode
    verdict: Verdict | None
    remark: Line | None = None


@dataclass(frozen=True)
class SidecarStarted:
    sidecar: Line
    pid: Pid


@dataclass(frozen=True)
class SidecarAnswers:
    sidecar: Line
    url: Line  # where it has said that it answers


@dataclass(frozen=True)
class SidecarExited:
    sidecar: Line
    code: EndCode  # -N for signal N


Event = (
    Planned
    | Ready
    | Started
    | FailedToStart
    | Exited
    | Signalled
    | Preempted
    | Swept
    | Restarting
    | RanksInspected
    | Noted
    | FirstCollective
    | Stalled
    | WentOn
    | NodeLost
    | LastCheckpoint
    | Ended
    | SidecarStarted
    | SidecarAnswers
    | SidecarExited
)

RECORDS: Mapping[str, type[Any]] = {
    "begun": Begun,
    "ready": Ready,
    "started": Started,
    "failed_to_start": FailedToStart,
    "exited": Exited,
    "signal": Signalled,
    "preempt": Preempted,
    "swept": Swept,
    "restart": Restarting,
    "inspected": RanksInspected,
    "note": Noted,
    "first_collective": FirstCollective,
    "stalled": Stalled,
    "went_on": WentOn,
    "node_lost": NodeLost,
    "checkpoint": LastCheckpoint,
    "ended": Ended,
    "sidecar_started": SidecarStarted,
    "sidecar_answers": SidecarAnswers,
    "sidecar_exited": SidecarExited,
    "left_out": LeftOut,
}
"""What events.jsonl and the history hold, by their names there: each with all its fields."""

_NAMES = {kind: name for name, kind in RECORDS.items()}


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


def line(event: Event | LeftOut, moment: float, **more: float) -> bytes:
    """An event as a line of JSON, with ``moment``, in seconds since the epoch, and ``more``; tuples are lists there."""
    kept: Any = Begun.of(event) if isinstance(event, Planned) else event
    if isinstance(kept, Restarting) and kept.verdict:
        kept = replace(kept, verdict=replace(kept.verdict, others=()))
    fields = {name: getattr(kept, name) for name in kept.__match_args__}
    said = {"time": moment, **more, "event": _NAMES[type(kept)], **fields}
    return json.dumps(said, default=lambda each: each.to_json()).encode() + b"\n"


def told(message: messages.Message) -> Event | None:
    """What node 0 tells this node, as an event; None where it is an order."""
    match message:
        case Restarting() | Stalled() | NodeLost():
            return message
        case messages.Inspected(serial=0, inspection=inspection):
            return RanksInspected(inspection)
        case messages.Note(text=text):
            return Noted(text)
        case messages.Progress():
            return WentOn()
    return None
