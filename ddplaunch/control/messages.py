"""What nodes say to each other, and a job of one node to itself: plain data.

Each field's type says what it may hold when it comes from another process (``wire.bounds``).
"""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control import MIN_HEARTBEAT_TIMEOUT_S
from ddplaunch.control.failure import FailureReport, JobResult, RankFailure
from ddplaunch.control.relay import FORWARDED_SIGNALS
from ddplaunch.dataclass import dataclass
from ddplaunch.plan.layout import NodeAssignment
from ddplaunch.plan.share import NodeSpec

if TYPE_CHECKING:
    from typing import Literal

    from ddplaunch.wire.bounds import (
        CommandText,
        Count,
        Hint,
        Name,
        Restarts,
        RunId,
        Seconds,
        Signal,
        StopSignal,
        Text,
        TextLine,
        Timestamp,
    )

PROTOCOL_VERSION = 17  # raised whenever a message changes, so that launchers of different versions tell each other so


@dataclass(frozen=True)
class Versions:
    """What must be the same for ranks to work together; None if it is unknown or not installed."""

    python: Name  # "3.11", and torch "2.13": patch levels may differ
    torch: Name | None = None
    cuda: Name | None = None
    nccl: Name | None = None


# ---------------------------------------------------------------------------------------------- to node 0


@dataclass(frozen=True)
class NodeHello:
    """A node that wants to take part: its share, and what must agree."""

    node_spec: NodeSpec
    nnodes: Name
    run_id: RunId | None
    target: CommandText  # as typed
    fingerprint: Name | None  # of its file's content; None if there is no file to compare
    max_restarts: Restarts
    versions: Versions
    gpus: tuple[Name, ...]  # the models
    nonce: Name = ""  # for node 0 to prove itself with
    proof: Name | None = None  # that this node knows the token (``proof`` has the form)
    has_node_rank: bool = True  # whether the node rank of the share is known; else it is the one that this node prefers

    @property
    def name(self) -> str:
        return self.node_spec.name


@dataclass(frozen=True)
class JoinDeclined:
    """Said by a node of this job that cannot take part, instead of a hello: why, as an error has it."""

    node_rank: Count
    host: Name
    message: TextLine
    hint: Hint | None
    run_id: RunId | None
    nonce: Name = ""
    proof: Name | None = None

    @property
    def name(self) -> str:
        return f"node {self.node_rank} ({self.host})"

    @property
    def text(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class FailureReported:
    """A rank failed; ``clock`` is this node's time when it says so, as moments are on its clock."""

    attempt: Count
    failure: RankFailure
    clock: Timestamp


@dataclass(frozen=True)
class RanksFinished:
    """All ranks of this node have done their work."""

    attempt: Count


@dataclass(frozen=True)
class LauncherFailure:
    """The launcher's own processes on a node ended unexpectedly."""

    reason: TextLine
    time: Timestamp  # by the node's clock


@dataclass(frozen=True)
class AttemptReport:
    """Nothing of the attempt is left on this node."""

    attempt: Count
    failures: tuple[RankFailure, ...]  # all of them, with the last lines that each rank printed
    stopped: Count  # how many ranks ended because they were stopped
    clock: Timestamp  # as in ``FailureReported``
    broken: LauncherFailure | None = None
    preemption_seen: bool = False  # whether a rank asked if the job is preempted, and the answer was yes


@dataclass(frozen=True)
class ArrivalsReported:
    """When ranks of this node that have done their work had arrived at their last collectives; before ``AttemptReport``."""

    attempt: Count
    arrivals: tuple[diagnosis.inspection.CollectiveArrivals, ...]


@dataclass(frozen=True)
class NodeStartError:
    """This node cannot start its ranks, for a reason that a user can fix."""

    message: TextLine
    hint: Hint | None = None


@dataclass(frozen=True)
class CheckPassed:
    """This machine has what its ranks need in the attempt."""

    attempt: Count


@dataclass(frozen=True)
class StopRequested:
    """A signal to end the job has come here, for the first time or ``again``."""

    signal: StopSignal
    again: bool = False
    reason: TextLine = ""  # that a rank has sent it


@dataclass(frozen=True)
class StallSuspected:
    """The ranks here have been silent for the stall timeout, and none of them gets on: has the job stalled?"""

    attempt: Count


@dataclass(frozen=True)
class RanksStarted:
    """The first rank here has its process."""

    attempt: Count


@dataclass(frozen=True)
class DebuggerActive:
    """Whether a rank here is in a debugger: a person takes the time that the job loses."""

    attempt: Count
    is_active: bool


@dataclass(frozen=True)
class StragglersFound:
    """Ranks here still run, though the last of the others ended as long ago as ``--straggler-timeout`` allows."""

    attempt: Count


@dataclass(frozen=True)
class PreemptionNotice:
    """The scheduler's warning has come here, by this signal: it soon needs the machines back."""

    signal: Signal


# ---------------------------------------------------------------------------------------------- from node 0


@dataclass(frozen=True)
class Welcome:
    """The first message on any connection to the control port."""

    ddplaunch: Count
    nonce: Name


@dataclass(frozen=True)
class JoinRefused:
    """You cannot take part, and why, as in an error."""

    message: TextLine
    hint: Hint | None = None


@dataclass(frozen=True)
class JoinAccepted:
    """You take part, from the next start on; ``node_rank`` is yours if you asked for one.

    ``late``: the ranks of other nodes have started before.
    """

    run_id: RunId
    heartbeat_timeout_s: Seconds
    proof: Name | None = None
    node_rank: Count | None = None
    late: bool = False

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < MIN_HEARTBEAT_TIMEOUT_S:
            raise ValueError(f"a heartbeat timeout of {self.heartbeat_timeout_s} s")


@dataclass(frozen=True)
class JoinStatus:
    """Which nodes have joined, while the job waits for more."""

    joined: Count
    min_nodes: Count
    max_nodes: Count
    missing: tuple[Count, ...]  # the lowest node ranks that have not joined
    window_s: Seconds | None = (
        None  # seconds until the job starts with those that have joined; None if they are too few
    )
    kind: Literal["node", "task"] = "node"  # what people call them


@dataclass(frozen=True)
class CheckNode:
    """Look whether your machine has what its ranks need in this attempt; the answer is ``CheckPassed`` or ``NodeStartError``."""

    attempt: Count
    gpu_memory_timeout: Seconds  # seconds to wait for memory of GPUs that is in use


@dataclass(frozen=True)
class StartAttempt:
    """Start your ranks."""

    attempt: Count  # 0 is the first
    run_id: RunId
    assignment: NodeAssignment | None = None  # the receiver's; None if it has the whole plan already
    # The rest is not sent: the receiver adds it.
    address: Name | None = None  # node 0's, as the receiver reaches it
    interface: Name | None = None  # the one that leads there
    node_specs: tuple[NodeSpec, ...] = ()  # of all nodes that take part, in order: only node 0 has them


@dataclass(frozen=True)
class StopAttempt:
    """Stop your ranks: this signal to their leaders, SIGKILL after ``grace_s`` seconds."""

    attempt: Count
    signal: StopSignal
    grace_s: Seconds


@dataclass(frozen=True)
class PreemptRanks:
    """The job is preempted: let your ranks know. They end by themselves, or are stopped later."""

    attempt: Count


@dataclass(frozen=True)
class ConnectingToNodeZero:
    """From a node to itself: node 0 is not reached yet, and why."""

    reason: TextLine


@dataclass(frozen=True)
class CoordinatorLost:
    """Said by a node to itself: node 0 does not speak for it any more, and what follows is its own."""


@dataclass(frozen=True)
class Restarting:
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` says it to people."""

    attempt: Count
    wait: Seconds
    text: Text
    verdict: FailureReport | None  # None where no rank failed, but a launcher's own processes were lost


@dataclass(frozen=True)
class NoteMessage:
    """A line for people."""

    text: Text


@dataclass(frozen=True)
class JobStalled:
    """The ranks get nowhere, since ``since``; ``text`` says it to people, and is "" where it is not for them.

    They hear why the attempt is stopped, or have heard of this stall: a rank has only printed something meanwhile.
    """

    since: Timestamp
    text: Text = ""


@dataclass(frozen=True)
class NodeLost:
    """Said by node 0 to itself: a node that took part was lost; its host."""

    host: Name


@dataclass(frozen=True)
class EndJob:
    """The job is over."""

    outcome: JobResult


# ---------------------------------------------------------------------------------------------- both ways


@dataclass(frozen=True)
class ProgressResumed:
    """From a node: its ranks work again, after it was ``JobStalled``. From node 0: so does the job."""

    attempt: Count


@dataclass(frozen=True)
class InspectRequest:
    """From node 0: what are your ranks doing? To node 0: what are all ranks doing? ``serial`` comes back with it."""

    serial: Count
    detail: diagnosis.inspection.Detail
    timeout_s: Seconds  # seconds until the answer is too late


@dataclass(frozen=True)
class InspectReply:
    """What ranks were found doing: the answer, or with serial 0 what is to be kept of an attempt that is stopped."""

    serial: Count
    inspection: diagnosis.inspection.Inspection


@dataclass(frozen=True)
class ProfileRequest:
    """From node 0: take a profile of your ranks. To node 0: of all ranks. ``serial`` comes back with each answer."""

    serial: Count
    seconds: Seconds
    torch: bool = False  # with torch's own profiler


@dataclass(frozen=True)
class ProfileReply:
    """The profile of one rank, or that there will be no more."""

    serial: Count
    profile: diagnosis.profile.RankProfile | None = None
    is_last: bool = False
    silent_nodes: tuple[TextLine, ...] = ()  # the nodes that did not answer: "node 2 (n2)"
    refusal: TextLine = ""  # why no profile is taken


@dataclass(frozen=True)
class ForwardSignal:
    """A signal for the ranks has come to this node; from node 0: pass it on to those that catch it."""

    number: Signal
    sent_to_group: bool = False  # it came to the ranks there too, so it is to be expected everywhere

    def __post_init__(self) -> None:
        if self.number not in FORWARDED_SIGNALS:
            raise ValueError(f"signal {self.number} is not for ranks")


@dataclass(frozen=True)
class HeartbeatMessage:
    """Still here; and what both need to compare their clocks (``clock_offset``)."""

    clock: Timestamp  # seconds since the epoch, by the sender's clock
    last_received: Timestamp | None = None  # the receiver's in the last beat that the sender heard from it
    held_s: Seconds = 0.0  # seconds since then


FromNode = (
    FailureReported
    | RanksFinished
    | ArrivalsReported
    | AttemptReport
    | NodeStartError
    | CheckPassed
    | StopRequested
    | PreemptionNotice
    | RanksStarted
    | StallSuspected
    | StragglersFound
    | ProgressResumed
    | DebuggerActive
    | InspectRequest
    | InspectReply
    | ProfileRequest
    | ProfileReply
    | ForwardSignal
    | HeartbeatMessage
)
FromNodeZero = (
    JoinStatus
    | CheckNode
    | StartAttempt
    | StopAttempt
    | PreemptRanks
    | Restarting
    | NoteMessage
    | JobStalled
    | ProgressResumed
    | EndJob
    | InspectRequest
    | InspectReply
    | ProfileRequest
    | ProfileReply
    | ForwardSignal
    | HeartbeatMessage
)
Message = (
    NodeHello
    | JoinDeclined
    | Welcome
    | JoinRefused
    | JoinAccepted
    | ConnectingToNodeZero
    | CoordinatorLost
    | NodeLost
    | FromNode
    | FromNodeZero
)

FROM_NODE: tuple[type[FromNode], ...] = FromNode.__args__
FROM_NODE_ZERO: tuple[type[FromNodeZero], ...] = FromNodeZero.__args__
