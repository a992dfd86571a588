"""What happens to one node's share of a job: each thing is a frozen dataclass, and emitted once.

Whoever wants to know is given to the supervisor from outside, as an ``Observer``; observers know nothing of each other.
``events.jsonl`` holds these events under their ``name``, with the fields that are not ``apart``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

from ddplaunch.control.failure import Verdict
from ddplaunch.plan.plan import Plan


@dataclass(frozen=True)
class Event:
    """One of those below."""

    name: ClassVar[str]

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name


@dataclass(frozen=True)
class Planned(Event, name="planned"):
    """The ranks of an attempt are known: plan.json is the plan."""

    plan: Plan = field(metadata={"apart": True})
    attempt: int


@dataclass(frozen=True)
class Ready(Event, name="ready"):
    """The zygote can start ranks; ``unsafe`` says why it does not fork, ``seconds`` how long its imports took."""

    forks: bool
    unsafe: str | None
    seconds: float


@dataclass(frozen=True)
class Started(Event, name="started"):
    rank: int
    pid: int
    attempt: int


@dataclass(frozen=True)
class FailedToStart(Event, name="failed_to_start"):
    rank: int
    errno: int  # why it got no process
    attempt: int


@dataclass(frozen=True)
class Finished(Event, name="finished"):
    """Rank 0's program has ended well; its process keeps the store for the others."""

    rank: int


@dataclass(frozen=True)
class Exited(Event, name="exited"):
    rank: int
    pid: int
    code: int  # -N for signal N
    attempt: int


@dataclass(frozen=True)
class Signalled(Event, name="signal"):
    number: int  # of the signal that has come to the launcher


@dataclass(frozen=True)
class Preempted(Event, name="preempt"):
    """The scheduler wants the machines back, and the ranks are told."""


@dataclass(frozen=True)
class Swept(Event, name="swept"):
    """Nothing of the attempt is left: ``found`` was ended, ``stuck`` cannot be killed."""

    found: tuple[str, ...]
    stuck: tuple[str, ...]


@dataclass(frozen=True)
class Restarting(Event, name="restart"):
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` says it to people."""

    attempt: int
    wait: float
    text: str = field(metadata={"apart": True})
    verdict: Verdict = field(metadata={"apart": True})


@dataclass(frozen=True)
class Noted(Event, name="note"):
    """Something that people should know of the job."""

    text: str


@dataclass(frozen=True)
class Ended(Event, name="ended"):
    """The job is over; ``code`` is the exit code, ``verdict`` the failure that decided it."""

    code: int
    verdict: Verdict | None = field(metadata={"apart": True})


@dataclass(frozen=True)
class SidecarStarted(Event, name="sidecar_started"):
    sidecar: str
    pid: int


@dataclass(frozen=True)
class SidecarAnswers(Event, name="sidecar_answers"):
    sidecar: str
    url: str  # where it has said that it answers


@dataclass(frozen=True)
class SidecarExited(Event, name="sidecar_exited"):
    sidecar: str
    code: int  # -N for signal N


class Observer(Protocol):
    """Hears of everything, in order, in the launcher's own thread; it may take no time and raise nothing."""

    def observe(self, event: Event) -> None: ...


def record(event: Event) -> dict[str, Any]:
    """The fields of an event as ``events.jsonl`` has them; tuples are lists there."""
    return {each.name: getattr(event, each.name) for each in fields(event) if not each.metadata.get("apart")}
