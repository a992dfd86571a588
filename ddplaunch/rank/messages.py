"""What the supervisor and its zygote say to each other, and what they tell a rank: the types of JSON, nothing more.

Imported for type checking alone, as neither the zygote nor a rank may load ``typing``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Usage = tuple[int, float, float]
"""What the kernel says of a process that has ended and of those that it waited for (getrusage(2)): bytes of memory that
the largest of them had at most, seconds of CPU time in their own code, and in the kernel."""


class WarmEndpoint(TypedDict):
    """Where a warm zygote is kept; the descriptors are of its own."""

    listening: int  # where launchers ask it for runs
    path: str  # of that socket
    reserved: list[int]  # what stands open at numbers that the first run's descriptors are to have
    leader: tuple[int, int]  # the session's leader, with which it ends: pid and start (``processes.start_ticks``)
    leader_pidfd: int | None  # None where the kernel gives none
    seconds: float  # for which it stays when no run needs it


class AllowedState(TypedDict):
    """What the import of known packages leaves in a process."""

    tops: list[str]
    sets: list[str]
    generators: list[str]


class ZygoteConfig(TypedDict):
    """What a zygote is started with, as ``ZygoteClient`` has it."""

    supervisor: int
    forks: bool  # otherwise it imports nothing, and every rank is a new interpreter
    modules: list[str]
    asked: list[str]
    fallback: list[str]  # to import instead where ``modules`` cannot be forked with; empty for nothing
    allowed: AllowedState  # what these leave in the process, with a fallback
    reads: list[str]  # variables that they read
    settings: dict[str, str]  # variables while it imports
    first: str
    folders: list[str]  # of the program's own, which it puts before those of installed packages
    remove: list[str]
    shielded: list[int]
    blocked: list[int]  # the signals that ranks begin with blocked
    ignores_children: bool  # whether ranks begin with SIGCHLD ignored
    failed: str | None  # why it has started over with its fallback
    unsafe: str | None  # why it has started over without forking, or is not to fork
    warm: WarmEndpoint | None  # of one that stays for other runs
    guarded: bool  # whether a guardian stands between it and the launcher, and it shares its modules with other runs


class _Rank(TypedDict):
    rank: int
    typed: str
    path: str  # of its file, if it has one
    args: list[str]
    env: dict[str, str]
    cpus: list[int] | None


class ProgramJob(_Rank):
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


class PythonJob(_Rank):
    """The user's Python code; of ``path``, ``module`` and ``function`` those that its kind has not are ""."""

    kind: Literal["script", "main", "module", "function"]
    module: str
    function: str
    first: str  # comes first in sys.path
    facts: RankFacts
    first_here: bool  # whether this is local rank 0
    backend: str | None
    init_method: str | None
    error_file: str | None  # where an exception is recorded
    trace_file: str | None  # where the rank tells of its last collectives
    trace_after: float  # seconds since its first process group
    oom_snapshot: str  # where the state of CUDA's allocator is kept when it runs out of memory; "" where it is not
    oom_summary: str  # and what there is to say about it
    debugger: str  # the socket at which a person debugs; "" where none can
    debugpy: bool  # whether an editor may attach
    post_mortem: bool  # whether the rank stays at the exception that ends it
    patient: bool  # whether process groups made without a timeout get a day
    title: str  # what ps shows


RankJob = ProgramJob | PythonJob


class SpawnRequest(TypedDict):
    """Start a rank: forked or, where that is not safe or not wanted, a fresh interpreter."""

    op: Literal["spawn"]
    rank: int
    job: RankJob
    fds: list[str]  # the purposes of the descriptors that come along


class ServeStore(TypedDict):
    """Have a new store, in a process of its own, on the listening socket that comes along; end the one before."""

    op: Literal["store"]


class SweepRequest(TypedDict):
    op: Literal["sweep"]
    grace: float
    patience: float


class RemoveRequest(TypedDict):
    op: Literal["remove"]
    path: str


class ReadyMessage(TypedDict):
    op: Literal["ready"]
    forks: bool
    failed: str | None
    unsafe: str | None
    seconds: float
    stores: bool  # whether the job's store can be in a fork of it
    pid: int  # with a pidfd, where it is not the launcher's child and the kernel gives one


class ImportFailedMessage(TypedDict):
    op: Literal["refused"]
    message: str


class SpawnedMessage(TypedDict):  # with a pidfd, where the kernel gives one
    op: Literal["spawned"]
    rank: int
    pid: int


class SpawnFailedMessage(TypedDict):
    op: Literal["unborn"]
    rank: int
    errno: int


class ExitedMessage(TypedDict):
    op: Literal["exited"]
    rank: int
    pid: int
    status: int
    usage: Usage


class StoreExited(TypedDict):
    """The process of the store has ended, though nothing has asked it to."""

    op: Literal["store exited"]
    pid: int
    status: int


class SweptMessage(TypedDict):
    op: Literal["swept"]
    found: list[str]
    stuck: list[str]


class SignalledMessage(TypedDict):
    """A signal has come to the zygote: from a rank or one of its children, or by the same way to the ranks."""

    op: Literal["signalled"]
    number: int
    rank: int | None


class WarmOrder(TypedDict):
    """The run that a launcher wants a zygote for: in a file in memory, as variables may be long."""

    config: ZygoteConfig
    environment: dict[str, str]
    fingerprint: dict[str, str]
    descriptors: list[int]  # the numbers that those of the launcher are to have: 0, 1, 2, and what else it hands on


class RunRequest(TypedDict):
    """Fork a zygote; with the order, its control socket, and one to tell the end by."""

    op: Literal["run"]


class ZygoteOffer(TypedDict):
    """A run's zygote is there, and waits on its control socket for ``FdHandover``; with its pidfd, as ``SpawnedMessage``."""

    op: Literal["take"]
    pid: int


class FdHandover(TypedDict):
    """The launcher's ``descriptors`` come along."""

    op: Literal["given"]


class StatusRequest(TypedDict):
    op: Literal["look"]


class StopRequest(TypedDict):
    """Leave; after the runs that there are."""

    op: Literal["stop"]


class WarmStatus(TypedDict):
    op: Literal["looked"]
    pid: int
    began: float  # seconds since the epoch
    left: float | None  # seconds until it leaves; None while a run needs it
    running: int
    served: int  # runs, those that have ended too
    modules: list[str]
    folder: str  # where it was started, and its runs are
    ending: bool


class RunDeclined(TypedDict):
    """A warm zygote does not fork a zygote for this run."""

    op: Literal["declined"]
    reason: str


class GuardianExited(TypedDict):
    """A guardian has nothing left of its run."""

    op: Literal["ended"]
    status: int  # how the run's zygote ended, as wait(2) has it
    stuck: list[str]


ToZygote = ServeStore | SpawnRequest | SweepRequest | RemoveRequest
FromZygote = (
    ReadyMessage
    | ImportFailedMessage
    | SpawnedMessage
    | SpawnFailedMessage
    | ExitedMessage
    | StoreExited
    | SweptMessage
    | SignalledMessage
)
ToWarm = RunRequest | StatusRequest | StopRequest | FdHandover
FromWarm = WarmStatus | RunDeclined | GuardianExited | ZygoteOffer
