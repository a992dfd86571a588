"""Control messages: what launchers send over the control port, or within the process on node 0. Plain data.

Each field's type has the bounds that are checked on arrival (``base.types``).
"""

from __future__ import annotations

from typing import Any, Literal

from ddplaunch.base.types import (
    MIN_HEARTBEAT_TIMEOUT_S,
    CommandText,
    Count,
    ExitCode,
    Hint,
    Name,
    Restarts,
    RunId,
    Seconds,
    Signal,
    StopSignal,
    TaggedMessage,
    TailLines,
    Text,
    TextLine,
    Timestamp,
)
from ddplaunch.core.failures import FailureReport, JobResult, RankFailure
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.plan.rank_layout import NodeAssignment
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS
from ddplaunch.system.target.versions import Versions

CHECK_NOTICE_INTERVAL_S = 10.0

PROTOCOL_VERSION = 25  # raised whenever a message changes, so that launchers of different versions detect it


class Message(TaggedMessage, frozen=True):
    """Base class of control messages."""


class FromNode(Message, frozen=True):
    """Base class of messages from a joined node to node 0. Features define more of them: ``Feature.messages``."""


class FeatureMessage(Message, frozen=True):
    """Base class of messages to the job side of a feature that may also come between attempts."""


class FromNodeZero(Message, frozen=True):
    """Base class of messages from node 0 to a joined node, or to itself. Features define more of them."""


class AttemptMessage(Message, frozen=True):
    """Base class of messages about one attempt; in another attempt they have no effect."""

    attempt: Count


class CheckRequest(AttemptMessage, frozen=True):
    """Base class of a feature's message that requests the check of a node before an attempt."""

    wait_s: Seconds | None  # how long the check may wait for what other processes hold; None: without end


# ---------------------------------------------------------------------------------------------- to node 0


class NodeHello(Message, frozen=True):
    """Handshake: a node that wants to join; its node spec, and what must be equal on all nodes."""

    node_spec: NodeSpec
    nnodes: Name
    run_id: RunId | None
    target: CommandText  # as given on the command line
    fingerprint: Name | None  # of the target file's content; None without a file
    max_restarts: Restarts
    versions: Versions
    gpus: tuple[Name, ...]  # models
    nonce: Name = ""  # for node 0's proof
    proof: Name | None = None  # that this node knows the token (``core/net/token_auth.py``)
    has_node_rank: bool = True  # False: the spec's node rank is only preferred
    domain: Name = ""  # nodes with the same one share fast links

    @property
    def name(self) -> str:
        return self.node_spec.name


class JoinDeclined(Message, frozen=True):
    """Sent instead of a hello by a node that cannot join: its error message and hint."""

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


class FailureReported(AttemptMessage, FromNode, frozen=True):
    """A rank has failed; sent at once. ``clock``: this node's time at that moment, to convert its timestamps."""

    failure: RankFailure
    clock: Timestamp


class RanksFinished(AttemptMessage, FromNode, frozen=True):
    """All ranks of this node have ended with 0."""


class LauncherFailure(TaggedMessage, frozen=True):
    """The launcher's own processes on a node ended unexpectedly."""

    reason: TextLine
    time: Timestamp  # by the node's clock


class AttemptReport(AttemptMessage, FromNode, frozen=True):
    """A node's final message of an attempt: all its processes have ended there."""

    stopped: Count  # number of ranks that were stopped
    clock: Timestamp  # as in ``FailureReported``
    broken: LauncherFailure | None = None
    preemption_seen: bool = False  # whether runtime.preempted() returned True in a rank
    tails: tuple[tuple[Count, TailLines], ...] = ()  # the last lines of the ranks that have failed, by rank


class NodeStartError(FromNode, frozen=True):
    """This node cannot start its ranks, or its check failed: a problem that a user can fix."""

    message: TextLine
    hint: Hint | None = None


class CheckPassed(AttemptMessage, FromNode, frozen=True):
    """This node's check for the attempt succeeded."""


class CheckContinues(AttemptMessage, FromNode, frozen=True):
    """This node's check for the attempt goes on; sent every ``CHECK_NOTICE_INTERVAL_S``."""


class StopRequested(FromNode, frozen=True):
    """This launcher got a signal to end the job, for the first time or ``again``."""

    signal: StopSignal
    again: bool = False
    reason: TextLine = ""  # where a rank requested it


class RanksStarted(AttemptMessage, FromNode, frozen=True):
    """The first rank of this node has started."""


class HoldChanged(AttemptMessage, FromNode, frozen=True):
    """Whether a rank of this node waits for a user; time limits are paused meanwhile."""

    is_holding: bool


class PreemptionNotice(FromNode, frozen=True):
    """This launcher got the scheduler's preemption signal."""

    signal: Signal


# ---------------------------------------------------------------------------------------------- from node 0


class Welcome(Message, frozen=True):
    """The first message on any connection to the control port."""

    ddplaunch: Count
    nonce: Name


class JoinRefused(Message, frozen=True):
    """The node cannot join: error message and hint."""

    message: TextLine
    hint: Hint | None = None


class JoinAccepted(Message, frozen=True):
    """The node has joined; ``node_rank`` is set if the hello had none. ``late``: ranks have started before."""

    run_id: RunId
    heartbeat_timeout_s: Seconds
    proof: Name | None = None
    node_rank: Count | None = None
    late: bool = False

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < MIN_HEARTBEAT_TIMEOUT_S:
            raise ValueError(f"a heartbeat timeout of {self.heartbeat_timeout_s} s")


class JoinStatus(FromNodeZero, frozen=True):
    """Which nodes have joined; sent while the job waits for more."""

    joined: Count
    min_nodes: Count
    max_nodes: Count
    missing: tuple[Count, ...]  # the lowest missing node ranks
    window_s: Seconds | None = None  # until the job starts with those that have joined; None if they are too few
    kind: Literal["node", "task"] = "node"  # the word in messages

    def describe(self) -> str:
        """Describe who has joined, without the elapsed time: "2/4 nodes joined, waiting for node 2, 3"."""
        count = f"{self.joined}/{self.max_nodes}"
        if self.min_nodes < self.max_nodes:
            count = f"{self.joined} of {self.min_nodes} to {self.max_nodes}"
        joined, missing = f"{count} {self.kind}s joined", f"{self.kind} {self.describe_missing()}"
        if self.window_s is not None:
            return f"{joined}, starting in {self.window_s:.0f} s unless {missing} joins first"
        return f"{joined}, waiting for {missing}"

    def describe_missing(self) -> str:
        """List the missing node ranks: "2, 3 and 5 more"."""
        unnamed = self.max_nodes - self.joined - len(self.missing)
        return ", ".join(map(str, self.missing)) + (f" and {unnamed} more" if unnamed > 0 else "")


class StartAttempt(FromNodeZero, frozen=True):
    """Order to a node to start its ranks; the receiver adds the fields after ``assignment``."""

    attempt: Count  # 0 is the first
    run_id: RunId
    assignment: NodeAssignment | None = None  # the receiver's; None if its plan is complete (one node)
    address: Name | None = None  # node 0's, as the receiver reaches it
    interface: Name | None = None  # of the route to node 0
    node_specs: tuple[NodeSpec, ...] = ()  # of all nodes with ranks, in order; on node 0 only


class StopAttempt(AttemptMessage, FromNodeZero, frozen=True):
    """Order to a node to stop its ranks: with this signal, then SIGKILL after ``grace_s`` seconds."""

    signal: StopSignal
    grace_s: Seconds


class PreemptRanks(AttemptMessage, FromNodeZero, frozen=True):
    """Order to a node to notify its ranks of a preemption; they end by themselves, or are stopped later."""


class ConnectingToNodeZero(Message, frozen=True):
    """Sent only within a process: node 0 is not reached yet, and why."""

    reason: TextLine


class CoordinatorLost(Message, frozen=True):
    """Sent only within a process: the connection to node 0 is lost; all later messages come from this node itself."""


class AttemptEnded(FromNodeZero, frozen=True):
    """The attempt has ended on all nodes, whatever follows: another one, or the end of the job."""

    attempt: Count
    code: ExitCode | None  # the exit code of a job that ends so; None if only its nodes change
    why: TextLine  # "" if all ranks have ended with 0


class Restarting(FromNodeZero, frozen=True):
    """The attempt failed; number ``attempt`` begins after ``wait`` seconds. ``text`` is the note to print."""

    attempt: Count
    wait: Seconds
    text: Text
    verdict: FailureReport | None  # None if a launcher failed, and no rank


class NoteMessage(FromNodeZero, frozen=True):
    """A note to print."""

    text: Text


class JobStalled(FromNodeZero, frozen=True):
    """The job makes no progress since ``since``; ``text`` is the note to print, or "".

    It is "" if the attempt is stopped for the stall, if a rank waits for a user, or if this stall was printed before.
    """

    since: Timestamp
    text: Text = ""


class NodeLost(Message, frozen=True):
    """Sent only within node 0's process: a node with ranks was lost; its host."""

    host: Name


class RanksInspected(Message, frozen=True):
    """Sent only within node 0's process: what the ranks are doing just before an attempt is stopped."""

    inspection: Any  # the feature's, with ``to_json``


class EndJob(FromNodeZero, frozen=True):
    """The job has ended, with this result."""

    outcome: JobResult


# ---------------------------------------------------------------------------------------------- both ways


class ProgressResumed(AttemptMessage, FromNode, FromNodeZero, frozen=True):
    """After ``JobStalled``, from a node: its ranks make progress again. From node 0: the job makes progress again."""


class RpcRequest(FromNode, FromNodeZero, frozen=True):
    """From node 0: a request about the receiver's ranks. To node 0: about all ranks. Replies have its ``serial``."""

    serial: Count
    kind: Name  # the name of the kind, which declares the types of the payloads
    timeout_s: Seconds  # for the last reply
    payload: Any  # checked on arrival by ``rpc.convert_payload``


class RpcReply(FromNode, FromNodeZero, frozen=True):
    """A reply to ``RpcRequest``, or the end of the replies. Node 0 sets the last two fields."""

    serial: Count
    kind: Name
    payload: Any = None
    is_last: bool = True
    silent_nodes: tuple[TextLine, ...] = ()  # without a reply: "node 2 (n2)"
    refusal: TextLine = ""  # why there are no replies


class ForwardSignal(FromNode, FromNodeZero, frozen=True):
    """From a node: its launcher got a signal for the ranks. From node 0: forward it to ranks with a handler."""

    number: Signal
    sent_to_group: bool = False  # the ranks of the sender's node got it too; those of each node may have

    def __post_init__(self) -> None:
        if self.number not in FORWARDED_SIGNALS:
            raise ValueError(f"signal {self.number} is not for ranks")


class HeartbeatMessage(FromNode, FromNodeZero, frozen=True):
    """A heartbeat, with the times from which both sides compute their clock offset (``clock_offset``)."""

    clock: Timestamp  # seconds since the epoch, by the sender's clock
    last_received: Timestamp | None = None  # ``clock`` of the last heartbeat that the sender received from this peer
    held_s: Seconds = 0.0  # since it was received
