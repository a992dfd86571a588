"""What the doctor asks the process on a node, and what that answers: one message each, whose types bound its fields."""

from __future__ import annotations

from ddplaunch.commands.doctor.benchmark import CollectiveTimes, DeviceThroughput, MeasureCollective, PrepareDevices
from ddplaunch.commands.doctor.checks.fabric import Fabric
from ddplaunch.commands.doctor.checks.network import RouteToNodeZero
from ddplaunch.commands.doctor.facts import NodeFacts
from ddplaunch.commands.doctor.ways import ConnectResult, ListenReply, PingResult, StreamResult
from ddplaunch.dataclass import dataclass
from ddplaunch.wire.bounds import Count, ExitCode, Name, TextLine, Timestamp

START_MARK = b"\x1eddplaunch doctor\x1e"
"""Comes before the first frame on stdout, where a login shell may have printed something."""


@dataclass(frozen=True)
class Ready:
    """The first message of a node's process, which nothing asks for."""

    version: TextLine


@dataclass(frozen=True)
class DescribeNode:
    """What is this machine like? Answered with facts.NodeFacts."""

    cwd: bytes
    toward: Name  # node 0's address; "" where there is one node
    environ: tuple[bytes, ...]  # NAME=value, for what is measured
    nonce: Name  # what nodes that connect to one another say
    thorough: bool = False


@dataclass(frozen=True)
class FindRoute:
    """How do you reach this address? Answered with Routed."""

    toward: Name


@dataclass(frozen=True)
class GetTime:
    """What is the time? Answered with Time."""


@dataclass(frozen=True)
class ListenOnPorts:
    """Listen at these ports and another one. Answered with ways.Listening."""

    ports: tuple[Count, ...]


@dataclass(frozen=True)
class ConnectTo:
    """Connect to these addresses and ports. Answered with Connected."""

    places: tuple[tuple[Name, Count], ...]


@dataclass(frozen=True)
class PingNode:
    """Exchange small packets with who listens there. Answered with ways.Pinged."""

    address: Name
    port: Count


@dataclass(frozen=True)
class SendStream:
    """Send a stream there. Answered with Flowed."""

    address: Name
    port: Count


@dataclass(frozen=True)
class CountErrors:
    """How many errors are there by now? Answered with Recounted."""


@dataclass(frozen=True)
class Exit:
    """That was all: end with the exit code of node 0. Not answered."""

    code: ExitCode


@dataclass(frozen=True)
class TimeReply:
    now: Timestamp


@dataclass(frozen=True)
class RouteReply:
    link: RouteToNodeZero | None


@dataclass(frozen=True)
class ErrorCounts:
    fabric: Fabric | None


@dataclass(frozen=True)
class ConnectReply:
    tried: tuple[ConnectResult, ...]


@dataclass(frozen=True)
class StreamReply:
    stream: StreamResult | None  # None where no connection came about


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
    | CountErrors
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
    | ErrorCounts
)
