"""Requests of the doctor to the process on each node, and the replies: one message each, with validated fields."""

from __future__ import annotations

from ddplaunch.base.types import Count, ExitCode, Name, TaggedMessage, TextLine, Timestamp
from ddplaunch.features.doctor.benchmark import DeviceThroughput, MeasureCollective, PrepareDevices
from ddplaunch.features.doctor.connectivity import ConnectResult, StreamResult
from ddplaunch.features.doctor.node_facts import RouteToNodeZero

START_MARK = b"\x1eddplaunch doctor\x1e"
"""Marks the start of the first frame on stdout: a login shell may have printed something before."""


class Ready(TaggedMessage, frozen=True):
    """Sent by a node's process, unasked, when it has started."""

    version: TextLine


class DescribeNode(TaggedMessage, frozen=True):
    """Describe the machine. Reply: node_facts.NodeFacts."""

    cwd: bytes
    toward: Name  # node 0's address; "" with one node
    environ: tuple[bytes, ...]  # NAME=value, for the benchmark processes
    nonce: Name  # the secret by which nodes recognise each other's test connections


class FindRoute(TaggedMessage, frozen=True):
    """Find the route to this address. Reply: RouteReply."""

    toward: Name


class GetTime(TaggedMessage, frozen=True):
    """Read the clock. Reply: TimeReply."""


class ListenOnPorts(TaggedMessage, frozen=True):
    """Listen on these ports and one that the kernel chooses. Reply: connectivity.ListenReply."""

    ports: tuple[Count, ...]


class ConnectTo(TaggedMessage, frozen=True):
    """Connect to these addresses and ports. Reply: ConnectReply."""

    addresses: tuple[tuple[Name, Count], ...]


class PingNode(TaggedMessage, frozen=True):
    """Exchange small packets with the node that listens at an address. Reply: connectivity.PingResult."""

    address: Name
    port: Count


class SendStream(TaggedMessage, frozen=True):
    """Send a stream of data to the node that listens at an address. Reply: StreamReply."""

    address: Name
    port: Count


class Exit(TaggedMessage, frozen=True):
    """Exit with the exit code of node 0. No reply."""

    code: ExitCode


class TimeReply(TaggedMessage, frozen=True):
    now: Timestamp


class RouteReply(TaggedMessage, frozen=True):
    link: RouteToNodeZero | None


class ConnectReply(TaggedMessage, frozen=True):
    tried: tuple[ConnectResult, ...]


class StreamReply(TaggedMessage, frozen=True):
    stream: StreamResult | None  # None: no connection was made


class PrepareReply(TaggedMessage, frozen=True):
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
