"""What the supervisor and its zygote say to each other, and what they tell a rank: the types of JSON, nothing more.

Imported for type checking alone, as neither the zygote nor a rank may load ``typing``.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class Config(TypedDict):
    """What a zygote is started with.

    ``modules`` are imported before it forks (none: each rank is a fresh interpreter), of which the user has ``asked``
    for some; ``first`` is the ranks' own folder; ``remove`` are paths to be removed should the supervisor be killed;
    ``shielded`` are signals for the supervisor alone; ``unsafe`` says why it started over without ``modules``.
    """

    supervisor: int
    modules: list[str]
    asked: list[str]
    first: str
    remove: list[str]
    shielded: list[int]
    unsafe: str | None


class Program(TypedDict):
    """A program that is executed; ``typed`` is its name as typed, ``path`` where it is."""

    rank: int
    kind: Literal["program"]
    typed: str
    path: str
    args: list[str]
    env: dict[str, str]
    cpus: list[int] | None


class Facts(TypedDict):
    """What a function's parameters of these names are given."""

    rank: int
    local_rank: int
    node_rank: int
    nnodes: int
    world_size: int
    local_world_size: int
    device: str


class Python(TypedDict):
    """Python code of the user's; ``path``, ``module`` and ``function`` are "" where the kind has none.

    ``first`` comes first in ``sys.path``; ``first_here`` is whether it is the first rank of its node; ``error_file``
    is where its exception is recorded; ``line_buffered`` is whether each line comes at once; ``store`` is where the
    job's store is; ``title`` is what ``ps`` shows.
    """

    rank: int
    kind: Literal["script", "module", "function"]
    typed: str
    path: str
    module: str
    function: str
    args: list[str]
    env: dict[str, str]
    cpus: list[int] | None
    first: str
    facts: Facts
    first_here: bool
    backend: str | None
    init_method: str | None
    store: tuple[str, int]
    error_file: str | None
    line_buffered: bool
    title: str


Job = Program | Python


class Spawn(TypedDict):
    """Start a rank; ``fds`` are the purposes of the descriptors that come along."""

    op: Literal["spawn"]
    rank: int
    job: Job
    fds: list[str]


class Sweep(TypedDict):
    """End all that is left below: SIGTERM after ``patience`` seconds, SIGKILL ``grace`` seconds later."""

    op: Literal["sweep"]
    grace: float
    patience: float


class Remove(TypedDict):
    """Remember a path that is to be removed."""

    op: Literal["remove"]
    path: str


class Ready(TypedDict):
    op: Literal["ready"]
    forks: bool
    unsafe: str | None
    seconds: float


class Refused(TypedDict):
    """A module of ``--preload`` cannot be imported."""

    op: Literal["refused"]
    message: str


class Spawned(TypedDict):
    """A rank has its process; a pidfd comes along where there is one."""

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


class Swept(TypedDict):
    """Nothing is left below: ``found`` was ended, ``stuck`` cannot be killed."""

    op: Literal["swept"]
    found: list[str]
    stuck: list[str]


Request = Spawn | Sweep | Remove
Answer = Ready | Refused | Spawned | Unborn | Exited | Swept
