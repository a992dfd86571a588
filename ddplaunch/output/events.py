"""What happens to one node's share of a job: each thing is frozen, and emitted once.

An ``Observer``, which the supervisor is given, hears of each; observers know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.failure import Verdict
from ddplaunch.dataclass import dataclass
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from typing import Any, Protocol

    from ddplaunch.wire.bounds import Amount, Count, EndCode, ExitCode, Line, Moment, Pid, Seconds, Signal, Size, Text
else:
    Protocol = object


@dataclass(frozen=True)
class Planned:
    """The ranks of an attempt are known: plan.json is the plan."""

    plan: Plan
    attempt: Count


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
class RankFinished:
    """Rank 0's program has ended well; its process keeps the store for the others."""

    rank: Count


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
class Restarting:
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` says it to people."""

    attempt: Count
    wait: Seconds
    text: Text
    verdict: Verdict | None  # None where a zygote was lost


@dataclass(frozen=True)
class RanksInspected:
    """What all ranks of the job were doing when the attempt was to be stopped; node 0 alone hears it."""

    inspection: diagnosis.inspection.Inspection


@dataclass(frozen=True)
class Noted:
    """Something that people should know of the job."""

    text: Line
    stalled_since: Moment | None = None  # it says that the job gets nowhere, since then


@dataclass(frozen=True)
class FirstCollective:
    """Every rank here has entered a collective of this attempt; ``moment``: when the last of them did."""

    moment: Moment


@dataclass(frozen=True)
class Stalled:
    """The ranks get nowhere, since ``since``."""

    since: Moment


@dataclass(frozen=True)
class WentOn:
    """The ranks that had stalled work again."""


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
    | RankFinished
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
    | Ended
    | SidecarStarted
    | SidecarAnswers
    | SidecarExited
)

RECORDS: Mapping[type, tuple[str, str]] = {
    Ready: ("ready", "forks unsafe seconds modules because excluded cold"),
    Started: ("started", "rank pid attempt"),
    FailedToStart: ("failed_to_start", "rank errno attempt"),
    RankFinished: ("finished", "rank"),
    Exited: ("exited", "rank pid code attempt peak_memory user_cpu system_cpu"),
    Signalled: ("signal", "number"),
    Preempted: ("preempt", ""),
    Swept: ("swept", "found stuck"),
    Restarting: ("restart", "attempt wait"),
    Noted: ("note", "text stalled_since"),
    FirstCollective: ("first_collective", "moment"),
    Stalled: ("stalled", "since"),
    WentOn: ("went_on", ""),
    Ended: ("ended", "code remark"),
    SidecarStarted: ("sidecar_started", "sidecar pid"),
    SidecarAnswers: ("sidecar_answers", "sidecar url"),
    SidecarExited: ("sidecar_exited", "sidecar code"),
}
"""What ``events.jsonl`` holds of each: its name there, and its fields; plan and inspections have files of their own."""


class Observer(Protocol):
    """Hears of everything, in order, in the launcher's own thread; it may take no time and raise nothing."""

    def observe(self, event: Event) -> None: ...


def record(event: Event) -> dict[str, Any]:
    """An event as ``events.jsonl`` has it; tuples are lists there."""
    name, fields = RECORDS[type(event)]
    return {"event": name, **{field: getattr(event, field) for field in fields.split()}}
