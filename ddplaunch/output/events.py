"""What happens to one node's share of a job: each thing is an immutable tuple of named fields, and emitted once.

Whoever wants to know is given to the supervisor from outside, as an ``Observer``; observers know nothing of each other.
Dataclasses would take 5 ms of every start to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ddplaunch.control.failure import Verdict
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Inspection


class Planned(NamedTuple):
    """The ranks of an attempt are known: plan.json is the plan."""

    plan: Plan
    attempt: int


class Ready(NamedTuple):
    """The zygote can start ranks; ``unsafe`` says why it does not fork, ``seconds`` how long its imports took."""

    forks: bool
    unsafe: str | None
    seconds: float


class Started(NamedTuple):
    rank: int
    pid: int
    attempt: int


class FailedToStart(NamedTuple):
    rank: int
    errno: int  # why it got no process
    attempt: int


class Finished(NamedTuple):
    """Rank 0's program has ended well; its process keeps the store for the others."""

    rank: int


class Exited(NamedTuple):
    rank: int
    pid: int
    code: int  # -N for signal N
    attempt: int
    peak_memory: int = 0  # bytes, of the largest of it and its children; 0 where the zygote was lost
    user_cpu: float = 0.0  # seconds, of it and its children
    system_cpu: float = 0.0


class Signalled(NamedTuple):
    number: int  # of the signal that has come to the launcher


class Preempted(NamedTuple):
    """The scheduler wants the machines back, and the ranks are told."""


class Swept(NamedTuple):
    """Nothing of the attempt is left: ``found`` was ended, ``stuck`` cannot be killed."""

    found: tuple[str, ...]
    stuck: tuple[str, ...]


class Restarting(NamedTuple):
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` says it to people."""

    attempt: int
    wait: float
    text: str
    verdict: Verdict


class Inspected(NamedTuple):
    """What all ranks of the job were doing when the attempt was to be stopped; node 0 alone hears it."""

    inspection: Inspection


class Noted(NamedTuple):
    """Something that people should know of the job."""

    text: str


class Ended(NamedTuple):
    """The job is over; ``code`` is the exit code, ``verdict`` the failure that decided it."""

    code: int
    verdict: Verdict | None


class SidecarStarted(NamedTuple):
    sidecar: str
    pid: int


class SidecarAnswers(NamedTuple):
    sidecar: str
    url: str  # where it has said that it answers


class SidecarExited(NamedTuple):
    sidecar: str
    code: int  # -N for signal N


Event = (
    Planned
    | Ready
    | Started
    | FailedToStart
    | Finished
    | Exited
    | Signalled
    | Preempted
    | Swept
    | Restarting
    | Inspected
    | Noted
    | Ended
    | SidecarStarted
    | SidecarAnswers
    | SidecarExited
)

RECORDS: Mapping[type, tuple[str, str]] = {
    Ready: ("ready", "forks unsafe seconds"),
    Started: ("started", "rank pid attempt"),
    FailedToStart: ("failed_to_start", "rank errno attempt"),
    Finished: ("finished", "rank"),
    Exited: ("exited", "rank pid code attempt peak_memory user_cpu system_cpu"),
    Signalled: ("signal", "number"),
    Preempted: ("preempt", ""),
    Swept: ("swept", "found stuck"),
    Restarting: ("restart", "attempt wait"),
    Noted: ("note", "text"),
    Ended: ("ended", "code"),
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
