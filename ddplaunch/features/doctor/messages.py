"""Requests of the doctor to the process on each node, and the replies: one message each, with validated fields."""

from __future__ import annotations

from ddplaunch.base.fast_dataclass import dataclass
from ddplaunch.base.field_types import Count, ExitCode, Name, TextLine, Timestamp
from ddplaunch.features.doctor.benchmark import CollectiveTimes, DeviceThroughput, MeasureCollective, PrepareDevices
from ddplaunch.features.doctor.connectivity import ConnectResult, ListenReply, PingResult, StreamResult
from ddplaunch.features.doctor.node_facts import NodeFacts, RouteToNodeZero

START_MARK = b"\x1eddplaunch doctor\x1e"
"""Marks the start of the first frame on stdout: a login shell may have printed something before."""


@dataclass(frozen=True)
class Ready:
    """Sent by a node's process, unasked, when it has started."""

    version: TextLine


@dataclass(frozen=True)
class DescribeNode:
    """Describe the machine. Reply: facts.NodeFacts."""

    cwd: bytes
    toward: Name  # node 0's address; "" with one node
    environ: tuple[bytes, ...]  # NAME=value, for the benchmark processes
    nonce: Name  # the secret by which nodes recognise each other's test connections


@dataclass(frozen=True)
class FindRoute:
    """Find the route to this address. Reply: RouteReply."""

    toward: Name


@dataclass(frozen=True)
class GetTime:
    """Read the clock. Reply: TimeReply."""


@dataclass(frozen=True)
class ListenOnPorts:
    """Listen on these ports and one that the kernel chooses. Reply: ways.ListenReply."""

    ports: tuple[Count, ...]


@dataclass(frozen=True)
class ConnectTo:
    """Connect to these addresses and ports. Reply: ConnectReply."""

    addresses: tuple[tuple[Name, Count], ...]


@dataclass(frozen=True)
class PingNode:
    """Exchange small packets with the node that listens there. Reply: ways.PingResult."""

    address: Name
    port: Count


@dataclass(frozen=True)
class SendStream:
    """Send a stream there. Reply: StreamReply."""

    address: Name
    port: Count


@dataclass(frozen=True)
class Exit:
    """Exit with the exit code of node 0. No reply."""

    code: ExitCode


@dataclass(frozen=True)
class TimeReply:
    now: Timestamp


@dataclass(frozen=True)
class RouteReply:
    link: RouteToNodeZero | None


@dataclass(frozen=True)
class ConnectReply:
    tried: tuple[ConnectResult, ...]


@dataclass(frozen=True)
class StreamReply:
    stream: StreamResult | None  # None: no connection was made


@dataclass(frozen=True)
class PrepareReply:
    powers: tuple[DeviceThroughput, ...]
    error: TextLine | None = None


Question = (
    DescribeNode
    | FindRoute
    | GetTime
    | ListenOnPorts
    | ConnectTo
    | PingNode
    | SendStream
    | PrepareDevices
    | MeasureCollective
)
NodeAnswer = (
    Ready
    | NodeFacts
    | RouteReply
    | TimeReply
    | ListenReply
    | ConnectReply
    | PingResult
    | StreamReply
    | PrepareReply
    | CollectiveTimes
)
