"""What nodes say to each other: plain data, checked field by field when it arrives (``wire`` has the form, ``bounds``
what each field may hold).

A node also hears these from the coordinator in its own process, so one node and many run the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddplaunch.control.failure import Failure, Outcome, Verdict
from ddplaunch.plan.share import Share

PROTOCOL = 5
"""Raised whenever a message changes, so that launchers of different versions tell each other so."""


class Garbled(Exception):
    """A message that makes no sense, or must not come now."""


@dataclass(frozen=True)
class Versions:
    """What must be the same for ranks to work together; None if it is unknown or not installed.

    ``torch`` and ``python`` as "2.13" and "3.11": patch levels may differ.
    """

    python: str
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None


# ---------------------------------------------------------------------------------------------- to node 0


@dataclass(frozen=True)
class Hello:
    """A node that wants to take part: its share, and what must agree.

    Attributes:
        target: as typed. fingerprint: of its file's content, None if there is no file to compare.
        gpus: the models.
        nonce: for node 0 to prove itself with; proof: that this node knows the token (``proof`` has the form).
        numbered: whether the node rank of the share is known; else it is the one that this node prefers.
    """

    share: Share
    nnodes: str
    run_id: str | None
    target: str
    fingerprint: str | None
    max_restarts: int
    versions: Versions
    gpus: tuple[str, ...]
    nonce: str = ""
    proof: str | None = None
    numbered: bool = True

    @property
    def name(self) -> str:
        """What people read: "node 1 (n1)"."""
        return self.share.name


@dataclass(frozen=True)
class Declined:
    """Instead of a hello: a node of this job that cannot take part, and why, as an error has it."""

    node_rank: int
    host: str
    message: str
    hint: str | None
    run_id: str | None
    nonce: str = ""
    proof: str | None = None

    @property
    def name(self) -> str:
        """What people read: "node 1 (n1)"."""
        return f"node {self.node_rank} ({self.host})"

    @property
    def says(self) -> str:
        """Why, and on which node."""
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class Failed:
    """A rank failed; ``clock`` is this node's time when it says so, as moments are on its clock."""

    attempt: int
    failure: Failure
    clock: float

    @property
    def failures(self) -> tuple[Failure, ...]:
        """It alone."""
        return (self.failure,)


@dataclass(frozen=True)
class Finished:
    """All ranks of this node have done their work."""

    attempt: int


@dataclass(frozen=True)
class Broken:
    """The launcher's own processes on a node ended unexpectedly."""

    how: str
    moment: float


@dataclass(frozen=True)
class Drained:
    """Nothing of the attempt is left on this node.

    Attributes:
        failures: all of them, with the last lines that each rank printed.
        stopped: how many ranks ended because they were stopped.
        broken: what happened to the launcher's own processes here, and when by its clock, if anything did.
        preemption_seen: whether a rank asked if the job is preempted, and the answer was yes.
    """

    attempt: int
    failures: tuple[Failure, ...]
    stopped: int
    clock: float
    broken: Broken | None = None
    preemption_seen: bool = False


@dataclass(frozen=True)
class Unable:
    """This node cannot start its ranks, for a reason that a user can fix."""

    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Interrupted:
    """A signal to end the job has come here, for the first time or ``again``."""

    signal: int
    again: bool = False


@dataclass(frozen=True)
class Warned:
    """The scheduler's warning has come here, by this signal: it soon needs the machines back."""

    signal: int


# ---------------------------------------------------------------------------------------------- from node 0


@dataclass(frozen=True)
class Welcome:
    """The first message on any connection to the control port."""

    ddplaunch: int
    nonce: str


@dataclass(frozen=True)
class Refused:
    """You cannot take part, and why, as in an error."""

    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Joined:
    """You take part, from the next start on; ``node_rank`` is yours if you asked for one."""

    run_id: str
    heartbeat_timeout: float
    proof: str | None = None
    node_rank: int | None = None


@dataclass(frozen=True)
class JoinStatus:
    """Which nodes have joined, while the job waits for more.

    Attributes:
        missing: the node ranks that have not joined, at most MAX_NAMED of them.
        window: seconds until the job starts with those that have joined; None if they are too few.
        kind: what people call them.
    """

    joined: int
    min_nodes: int
    max_nodes: int
    missing: tuple[int, ...]
    window: float | None = None
    kind: Literal["node", "task"] = "node"


MAX_NAMED = 8


@dataclass(frozen=True)
class Start:
    """Start your ranks.

    Attributes:
        attempt: 0 is the first.
        shares: of all nodes that take part, in the order of their ranks; none if each node already has the whole plan.
        address: node 0's, as the receiver reaches it. interface: the one that leads there.
    """

    attempt: int
    run_id: str
    shares: tuple[Share, ...] = ()
    address: str | None = None
    interface: str | None = None


@dataclass(frozen=True)
class Stop:
    """Stop your ranks: this signal to their leaders, SIGKILL after ``grace`` seconds."""

    attempt: int
    signal: int
    grace: float


@dataclass(frozen=True)
class Preempt:
    """The job is preempted: let your ranks know. They end by themselves, or are stopped later."""

    attempt: int


@dataclass(frozen=True)
class Release:
    """All ranks of all nodes have done their work: rank 0 need not keep the store any longer."""

    attempt: int


@dataclass(frozen=True)
class Seeking:
    """From a node to itself: node 0 is not reached yet, and why."""

    trouble: str


@dataclass(frozen=True)
class Alone:
    """Said by a node to itself: node 0 does not speak for it any more, and what follows is its own."""


@dataclass(frozen=True)
class Again:
    """The attempt failed; the next follows after ``wait`` seconds. ``text`` says it to people."""

    attempt: int
    wait: float
    text: str
    verdict: Verdict


@dataclass(frozen=True)
class Note:
    """A line for people."""

    text: str


@dataclass(frozen=True)
class End:
    """The job is over."""

    outcome: Outcome


# ---------------------------------------------------------------------------------------------- both ways


@dataclass(frozen=True)
class Beat:
    """Still here."""


FromNode = Failed | Finished | Drained | Unable | Interrupted | Warned | Beat
FromNodeZero = JoinStatus | Start | Stop | Preempt | Release | Again | Note | End | Beat
Message = Hello | Declined | Welcome | Refused | Joined | Seeking | Alone | FromNode | FromNodeZero
