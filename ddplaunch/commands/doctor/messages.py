"""What the doctor asks the process on a node, and what that answers: one message each, whose types bound its fields."""

from __future__ import annotations

from ddplaunch.commands.doctor.benchmark import DevicePower, Measure, Measured, Prepare
from ddplaunch.commands.doctor.checks.fabric import Fabric
from ddplaunch.commands.doctor.checks.network import Link
from ddplaunch.commands.doctor.facts import NodeFacts
from ddplaunch.commands.doctor.ways import Listening, Pinged, Streamed, Tried
from ddplaunch.dataclass import dataclass
from ddplaunch.wire.bounds import Count, ExitCode, Line, Moment, Name

MARK = b"\x1eddplaunch doctor\x1e"
"""Comes before the first frame on stdout, where a login shell may have printed something."""


@dataclass(frozen=True)
class Present:
    """The first message of a node's process, which nothing asks for."""

    version: Line


@dataclass(frozen=True)
class Describe:
    """What is this machine like? Answered with facts.NodeFacts."""

    cwd: bytes
    toward: Name  # node 0's address; "" where there is one node
    environ: tuple[bytes, ...]  # NAME=value, for what is measured
    nonce: Name  # what nodes that connect to one another say
    thorough: bool = False


@dataclass(frozen=True)
class Route:
    """How do you reach this address? Answered with Routed."""

    toward: Name


@dataclass(frozen=True)
class Tell:
    """What is the time? Answered with Time."""


@dataclass(frozen=True)
class Listen:
    """Listen at these ports and another one. Answered with ways.Listening."""

    ports: tuple[Count, ...]


@dataclass(frozen=True)
class Connect:
    """Connect to these addresses and ports. Answered with Connected."""

    places: tuple[tuple[Name, Count], ...]


@dataclass(frozen=True)
class Ping:
    """Exchange small packets with who listens there. Answered with ways.Pinged."""

    address: Name
    port: Count


@dataclass(frozen=True)
class SendStream:
    """Send a stream there. Answered with Flowed."""

    address: Name
    port: Count


@dataclass(frozen=True)
class Recount:
    """How many errors are there by now? Answered with Recounted."""


@dataclass(frozen=True)
class Leave:
    """That was all: end with the exit code of node 0. Not answered."""

    code: ExitCode


@dataclass(frozen=True)
class Time:
    now: Moment


@dataclass(frozen=True)
class Routed:
    link: Link | None


@dataclass(frozen=True)
class Recounted:
    fabric: Fabric | None


@dataclass(frozen=True)
class Connected:
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class Flowed:
    stream: Streamed | None  # None where no connection came about


@dataclass(frozen=True)
class Prepared:
    powers: tuple[DevicePower, ...]
    error: Line | None = None


Question = Describe | Route | Tell | Listen | Connect | Ping | SendStream | Prepare | Measure | Recount
NodeAnswer = (
    Present | NodeFacts | Routed | Time | Listening | Connected | Pinged | Flowed | Prepared | Measured | Recounted
)
