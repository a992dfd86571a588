"""What ``doctor`` asks the process that it has started on a node, and what that answers: a line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import msgspec
from msgspec import Meta

from ddplaunch.commands.doctor.benchmark import Ready
from ddplaunch.commands.doctor.facts import Link
from ddplaunch.commands.doctor.ways import Place, Tried
from ddplaunch.dataclass import dataclass

MARK = b"\x1eddplaunch doctor "
"""Begins our lines on stdout, where a login shell may print too."""


@dataclass(frozen=True)
class Look:
    """How are you? Answered with facts.Facts."""

    cwd: str
    toward: str  # node 0's address; "" where there is one node
    environ: dict[str, str]  # for what is measured


@dataclass(frozen=True)
class Route:
    """How do you reach this address? Answered with Routed."""

    toward: str


@dataclass(frozen=True)
class Tell:
    """What is the time? Answered with Time."""


@dataclass(frozen=True)
class Listen:
    """Listen at these ports and another one. Answered with ways.Listening."""

    ports: tuple[int, ...]
    nonce: str


@dataclass(frozen=True)
class Try:
    """Connect to these places. Answered with Ways."""

    places: tuple[Place, ...]
    nonce: str


@dataclass(frozen=True)
class Prepare:
    """Listen no more, and start what measures. Answered with Prepared."""

    devices: tuple[str, ...]
    interface: str  # for gloo; "" for its own choice


@dataclass(frozen=True)
class Measure:
    """Measure an all_reduce with your first ``count`` devices. Answered with benchmark.Measured."""

    address: str  # "" for one on this node alone
    port: int
    first: int  # the rank of the first device
    count: int
    world_size: int


@dataclass(frozen=True)
class End:
    """That was all: end with the exit code of node 0. Not answered."""

    code: Annotated[int, Meta(ge=0, le=255)]


@dataclass(frozen=True)
class Time:
    now: float  # seconds since 1970


@dataclass(frozen=True)
class Routed:
    link: Link | None


@dataclass(frozen=True)
class Ways:
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class Prepared:
    ready: tuple[Ready, ...]
    error: str | None = None


Question = Look | Route | Tell | Listen | Try | Prepare | Measure
ORDERS: dict[str, type[Question | End]] = {
    each.__name__: each for each in (Look, Route, Tell, Listen, Try, Prepare, Measure, End)
}


def write_question(question: Question | End) -> bytes:
    """One line; bytes of a path that are not UTF-8 stay what they are."""
    return json.dumps({"ask": type(question).__name__, "about": asdict(question)}).encode() + b"\n"


def read_question(line: bytes) -> Question | End:
    """Read what ``write_question`` has written. Raises ValueError if it is something else."""
    asked = json.loads(line)
    try:
        return msgspec.convert(asked["about"], ORDERS[asked["ask"]])
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from None
