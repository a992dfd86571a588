"""What nodes say to each other, and a job of one node to itself: plain data.

Each field's type says what it may hold when it comes from another process (``wire.bounds``).
"""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control import MIN_HEARTBEAT
from ddplaunch.control.failure import Failure, Outcome, Verdict
from ddplaunch.control.relay import FOR_RANKS
from ddplaunch.dataclass import dataclass
from ddplaunch.plan.layout import Place
from ddplaunch.plan.share import Share

if TYPE_CHECKING:
    from typing import Literal

    from ddplaunch.wire.bounds import (
        Count,
        Hint,
        Line,
        Moment,
        Name,
        Restarts,
        RunId,
        Seconds,
        Signal,
        StopSignal,
        Text,
        Typed,
    )

PROTOCOL = 16  # raised whenever a message changes, so that launchers of different versions tell each other so


@dataclass(frozen=True)
class Versions:
    """What must be the same for ranks to work together; None if it is unknown or not installed."""

    python: Name  # "3.11", and torch "2.13": patch levels may differ
    torch: Name | None = None
    cuda: Name | None = None
    nccl: Name | None = None


# ---------------------------------------------------------------------------------------------- to node 0


@dataclass(frozen=True)
class Hello:
    """A node that wants to take part: its share, and what must agree."""

    share: Share
    nnodes: Name
    run_id: RunId | None
    target: Typed  # as typed
    fingerprint: Name | None  # of its file's content; None if there is no file to compare
    max_restarts: Restarts
    versions: Versions
    gpus: tuple[Name, ...]  # the models
    nonce: Name = ""  # for node 0 to prove itself with
    proof: Name | None = None  # that this node knows the token (``proof`` has the form)
    numbered: bool = True  # whether the node rank of the share is known; else it is the one that this node prefers

    @property
    def name(self) -> str:
        return self.share.name


@dataclass(frozen=True)
class Declined:
    """Said by a node of this job that cannot take part, instead of a hello: why, as an error has it."""

    node_rank: Count
    host: Name
    message: Line
    hint: Hint | None
    run_id: RunId | None
    nonce: Name = ""
    proof: Name | None = None

    @property
    def name(self) -> str:
        return f"node {self.node_rank} ({self.host})"

    @property
    def says(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class Failed:
    """A rank failed; ``clock`` is this node's time when it says so, as moments are on its clock."""

    attempt: Count
    failure: Failure
    clock: Moment


@dataclass(frozen=True)
class Finished:
    """All ranks of this node have done their work."""

    attempt: Count


@dataclass(frozen=True)
class Broken:
    """The launcher's own processes on a node ended unexpectedly."""

    how: Line
    moment: Moment  # by the node's clock


@dataclass(frozen=True)
class Drained:
    """Nothing of the attempt is left on this node."""

    attempt: Count
    failures: tuple[Failure, ...]  # all of them, with the last lines that each rank printed
    stopped: Count  # how many ranks ended because they were stopped
    clock: Moment  # as in ``Failed``
    broken: Broken | None = None
    preemption_seen: bool = False  # whether a rank asked if the job is preempted, and the answer was yes


@dataclass(frozen=True)
class Arrived:
    """When ranks of this node that have done their work had arrived at their last collectives; before ``Drained``."""

    attempt: Count
    arrivals: tuple[diagnosis.inspection.Arrivals, ...]


@dataclass(frozen=True)
class Unable:
    """This node cannot start its ranks, for a reason that a user can fix."""

    message: Line
    hint: Hint | None = None


@dataclass(frozen=True)
class Checked:
    """This machine has what its ranks need in the attempt."""

    attempt: Count


@dataclass(frozen=True)
class Interrupted:
    """A signal to end the job has come here, for the first time or ``again``."""

    signal: StopSignal
    again: bool = False
    reason: Line = ""  # that a rank has sent it


@dataclass(frozen=True)
class Suspicion:
    """The ranks here have been silent for the stall timeout, and none of them gets on: has the job stalled?"""

    attempt: Count


@dataclass(frozen=True)
class RanksStarted:
    """The first rank here has its process."""

    attempt: Count


@dataclass(frozen=True)
class Debugged:
    """Whether a rank here is in a debugger: a person takes the time that the job loses."""

    attempt: Count
    busy: bool


@dataclass(frozen=True)
class Straggling:
    """Ranks here still run, though the last of the others ended as long ago as ``--straggler-timeout`` allows."""

    attempt: Count


@dataclass(frozen=True)
class Warned:
    """The scheduler's warning has come here, by this signal: it soon needs the machines back."""

    signal: Signal


# ---------------------------------------------------------------------------------------------- from node 0


@dataclass(frozen=True)
class Welcome:
    """The first message on any connection to the control port."""

    ddplaunch: Count
    nonce: Name


@dataclass(frozen=True)
class Refused:
    """You cannot take part, and why, as in an error."""

    message: Line
    hint: Hint | None = None


@dataclass(frozen=True)
class Joined:
    """You take part, from the next start on; ``node_rank`` is yours if you asked for one.

    ``late``: the ranks of other nodes have started before.
    """

    run_id: RunId
    heartbeat_timeout: Seconds
    proof: Name | None = None
    node_rank: Count | None = None
    late: bool = False

    def __post_init__(self) -> None:
        if self.heartbeat_timeout < MIN_HEARTBEAT:
            raise ValueError(f"a heartbeat timeout of {self.heartbeat_timeout} s")


@dataclass(frozen=True)
class JoinStatus:
    """Which nodes have joined, while the job waits for more."""

    joined: Count
    min_nodes: Count
    max_nodes: Count
    missing: tuple[Count, ...]  # the lowest node ranks that have not joined
    window: Seconds | None = None  # seconds until the job starts with those that have joined; None if they are too few
    kind: Literal["node", "task"] = "node"  # what people call them


@dataclass(frozen=True)
class Check:
    """Look whether your machine has what its ranks need in this attempt; the answer is ``Checked`` or ``Unable``."""

    attempt: Count
    gpu_memory_timeout: Seconds  # seconds to wait for memory of GPUs that is in use


@dataclass(frozen=True)
class Start:
    """Start your ranks."""

    attempt: Count  # 0 is the first
    run_id: RunId
    place: Place | None = None  # the receiver's; None if it has the whole plan already
    # The rest is not sent: the receiver adds it.
    address: Name | None = None  # node 0's, as the receiver reaches it
    interface: Name | None = None  # the one that leads there
    shares: tuple[Share, ...] = ()  # of all nodes that take part, in order: only node 0 has them


@dataclass(frozen=True)
class Stop:
    """Stop your ranks: this signal to their leaders, SIGKILL after ``grace`` seconds."""

    attempt: Count
    signal: StopSignal
    grace: Seconds


@dataclass(frozen=True)
class Preempt:
    """The job is preempted: let your ranks know. They end by themselves, or are stopped later."""

    attempt: Count


@dataclass(frozen=True)
class Seeking:
    """From a node to itself: node 0 is not reached yet, and why."""

    trouble: Line


@dataclass(frozen=True)
class Alone:
    """Said by a node to itself: node 0 does not speak for it any more, and what follows is its own."""


@dataclass(frozen=True)
class Restarting:
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` says it to people."""

    attempt: Count
    wait: Seconds
    text: Text
    verdict: Verdict | None  # None where no rank failed, but a launcher's own processes were lost


@dataclass(frozen=True)
class Note:
    """A line for people."""

    text: Text


@dataclass(frozen=True)
class Stalled:
    """The ranks get nowhere, since ``since``; ``text`` says it to people, and is "" where it is not for them.

    They hear why the attempt is stopped, or have heard of this stall: a rank has only printed something meanwhile.
    """

    since: Moment
    text: Text = ""


@dataclass(frozen=True)
class NodeLost:
    """Said by node 0 to itself: a node that took part was lost; its host."""

    host: Name


@dataclass(frozen=True)
class End:
    """The job is over."""

    outcome: Outcome


# ---------------------------------------------------------------------------------------------- both ways


@dataclass(frozen=True)
class Progress:
    """From a node: its ranks work again, after it was ``Stalled``. From node 0: so does the job."""

    attempt: Count


@dataclass(frozen=True)
class Inspect:
    """From node 0: what are your ranks doing? To node 0: what are all ranks doing? ``serial`` comes back with it."""

    serial: Count
    detail: diagnosis.inspection.Detail
    within: Seconds  # seconds until the answer is too late


@dataclass(frozen=True)
class Inspected:
    """What ranks were found doing: the answer, or with serial 0 what is to be kept of an attempt that is stopped."""

    serial: Count
    inspection: diagnosis.inspection.Inspection


@dataclass(frozen=True)
class TakeProfile:
    """From node 0: take a profile of your ranks. To node 0: of all ranks. ``serial`` comes back with each answer."""

    serial: Count
    seconds: Seconds
    torch: bool = False  # with torch's own profiler


@dataclass(frozen=True)
class Profiled:
    """The profile of one rank, or that there will be no more."""

    serial: Count
    profile: diagnosis.profile.RankProfile | None = None
    over: bool = False
    silent: tuple[Line, ...] = ()  # the nodes that did not answer: "node 2 (n2)"
    refused: Line = ""  # why no profile is taken


@dataclass(frozen=True)
class ForRanks:
    """A signal for the ranks has come to this node; from node 0: pass it on to those that catch it."""

    number: Signal
    direct: bool = False  # it came to the ranks there too, so it is to be expected everywhere

    def __post_init__(self) -> None:
        if self.number not in FOR_RANKS:
            raise ValueError(f"signal {self.number} is not for ranks")


@dataclass(frozen=True)
class Beat:
    """Still here; and what both need to compare their clocks (``clock_offset``)."""

    clock: Moment  # seconds since the epoch, by the sender's clock
    heard: Moment | None = None  # the receiver's in the last beat that the sender heard from it
    held: Seconds = 0.0  # seconds since then


FromNode = (
    Failed
    | Finished
    | Arrived
    | Drained
    | Unable
    | Checked
    | Interrupted
    | Warned
    | RanksStarted
    | Suspicion
    | Straggling
    | Progress
    | Debugged
    | Inspect
    | Inspected
    | TakeProfile
    | Profiled
    | ForRanks
    | Beat
)
FromNodeZero = (
    JoinStatus
    | Check
    | Start
    | Stop
    | Preempt
    | Restarting
    | Note
    | Stalled
    | Progress
    | End
    | Inspect
    | Inspected
    | TakeProfile
    | Profiled
    | ForRanks
    | Beat
)
Message = Hello | Declined | Welcome | Refused | Joined | Seeking | Alone | NodeLost | FromNode | FromNodeZero

FROM_NODE: tuple[type[FromNode], ...] = FromNode.__args__
FROM_NODE_ZERO: tuple[type[FromNodeZero], ...] = FromNodeZero.__args__
