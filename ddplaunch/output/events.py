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
class Planned:
    """The ranks of an attempt are known: plan.json is the plan."""

    name: ClassVar[str] = "planned"
    plan: Plan = field(metadata={"apart": True})
    attempt: int


@dataclass(frozen=True)
class Ready:
    """The zygote can start ranks; ``unsafe`` says why it does not fork, ``seconds`` how long its imports took."""

    name: ClassVar[str] = "ready"
    forks: bool
    unsafe: str | None
    seconds: float


@dataclass(frozen=True)
class Started:
    """A rank has its process."""

    name: ClassVar[str] = "started"
    rank: int
    pid: int
    attempt: int


@dataclass(frozen=True)
class FailedToStart:
    """A rank got no process; ``errno`` says why."""

    name: ClassVar[str] = "failed_to_start"
    rank: int
    errno: int
    attempt: int


@dataclass(frozen=True)
class Finished:
    """Rank 0's program has ended well; its process keeps the store for the others."""

    name: ClassVar[str] = "finished"
    rank: int


@dataclass(frozen=True)
class Exited:
    """A rank's process has ended; ``code`` is -N for signal N."""

    name: ClassVar[str] = "exited"
    rank: int
    pid: int
    code: int
    attempt: int


@dataclass(frozen=True)
class Signalled:
    """A signal has come to the launcher."""

    name: ClassVar[str] = "signal"
    number: int


@dataclass(frozen=True)
class Preempted:
    """The scheduler wants the machines back, and the ranks are told."""

    name: ClassVar[str] = "preempt"


@dataclass(frozen=True)
class Swept:
    """Nothing of the attempt is left: ``found`` was ended, ``stuck`` cannot be killed."""

    name: ClassVar[str] = "swept"
    found: tuple[str, ...]
    stuck: tuple[str, ...]


@dataclass(frozen=True)
class Restarting:
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` says it to people."""

    name: ClassVar[str] = "restart"
    attempt: int
    wait: float
    text: str = field(metadata={"apart": True})
    verdict: Verdict = field(metadata={"apart": True})


@dataclass(frozen=True)
class Noted:
    """Something that people should know of the job."""

    name: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class Ended:
    """The job is over; ``code`` is the exit code, ``verdict`` the failure that decided it."""

    name: ClassVar[str] = "ended"
    code: int
    verdict: Verdict | None = field(metadata={"apart": True})


@dataclass(frozen=True)
class SidecarStarted:
    """A sidecar has its process."""

    name: ClassVar[str] = "sidecar_started"
    sidecar: str
    pid: int


@dataclass(frozen=True)
class SidecarAnswers:
    """A sidecar has said where it answers."""

    name: ClassVar[str] = "sidecar_answers"
    sidecar: str
    url: str


@dataclass(frozen=True)
class SidecarExited:
    """A sidecar's process has ended; ``code`` is -N for signal N."""

    name: ClassVar[str] = "sidecar_exited"
    sidecar: str
    code: int


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
    | Noted
    | Ended
    | SidecarStarted
    | SidecarAnswers
    | SidecarExited
)


class Observer(Protocol):
    """Hears of everything, in order, in the launcher's own thread; it may take no time and raise nothing."""

    def observe(self, event: Event) -> None:
        """Take in what has happened."""


def record(event: Event) -> dict[str, Any]:
    """The fields of an event as ``events.jsonl`` has them; tuples are lists there."""
    return {each.name: getattr(event, each.name) for each in fields(event) if not each.metadata.get("apart")}
