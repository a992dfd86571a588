"""What the supervisor and its zygote say to each other, and what they tell a rank: the types of JSON, nothing more.

Imported for type checking alone, as neither the zygote nor a rank may load ``typing``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Usage = tuple[int, float, float]
"""What the kernel says of a process that has ended and of those that it waited for (getrusage(2)): bytes of memory that
the largest of them had at most, seconds of CPU time in their own code, and in the kernel."""


class Config(TypedDict):
    """What a zygote is started with, as ``ZygoteClient`` has it."""

    supervisor: int
    forks: bool  # otherwise it imports nothing, and every rank is a new interpreter
    modules: list[str]
    asked: list[str]
    fallback: list[str]  # to import instead where ``modules`` cannot be forked with; empty for nothing
    settings: dict[str, str]  # variables while it imports
    first: str
    remove: list[str]
    shielded: list[int]
    failed: str | None  # why it has started over with its fallback
    unsafe: str | None  # why it has started over without forking, or is not to fork


class _Rank(TypedDict):
    rank: int
    typed: str
    path: str  # of its file, if it has one
    args: list[str]
    env: dict[str, str]
    cpus: list[int] | None


class Program(_Rank):
    kind: Literal["program"]


class RankFacts(TypedDict):
    """What a function's parameters of these names are given."""

    rank: int
    local_rank: int
    node_rank: int
    nnodes: int
    world_size: int
    local_world_size: int
    device: str


class Python(_Rank):
    """The user's Python code; of ``path``, ``module`` and ``function`` those that its kind has not are ""."""

    kind: Literal["script", "module", "function"]
    module: str
    function: str
    first: str  # comes first in sys.path
    facts: RankFacts
    first_here: bool  # whether this is local rank 0
    backend: str | None
    init_method: str | None
    store: tuple[str, int]
    error_file: str | None  # where an exception is recorded
    trace_file: str | None  # where the rank tells of its last collectives
    trace_after: float  # seconds since its first process group
    imports_file: str | None  # where a fork tells what it has imported
    line_buffered: bool  # whether each line comes at once
    title: str  # what ps shows


RankJob = Program | Python


class Spawn(TypedDict):
    """Start a rank: forked or, where that is not safe or not wanted, a fresh interpreter."""

    op: Literal["spawn"]
    rank: int
    job: RankJob
    fds: list[str]  # the purposes of the descriptors that come along


class Sweep(TypedDict):
    op: Literal["sweep"]
    grace: float
    patience: float


class Remove(TypedDict):
    op: Literal["remove"]
    path: str


class Ready(TypedDict):
    op: Literal["ready"]
    forks: bool
    failed: str | None
    unsafe: str | None
    seconds: float


class Refused(TypedDict):
    op: Literal["refused"]
    message: str


class Spawned(TypedDict):  # with a pidfd
    op: Literal["spawned"]
    rank: int
    pid: int


class Unborn(TypedDict):
    op: Literal["unborn"]
    rank: int
    errno: int


class Exited(TypedDict):
    op: Literal["exited"]
    rank: int
    pid: int
    status: int
    usage: Usage


class Swept(TypedDict):
    op: Literal["swept"]
    found: list[str]
    stuck: list[str]


ToZygote = Spawn | Sweep | Remove
FromZygote = Ready | Refused | Spawned | Unborn | Exited | Swept
