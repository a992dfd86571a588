"""Types of the JSON messages between supervisor, zygote, warm zygote and guardian, and of a rank's job.

Imported for type checking only: neither the zygote nor a rank may load ``typing``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Usage = tuple[int, float, float]
"""Resource usage of an ended process and the children it waited for (getrusage(2)): peak memory in bytes (the maximum
of them), user and system CPU time in seconds."""


class WarmEndpoint(TypedDict):
    """Socket, lifetime and inherited descriptors of a warm zygote."""

    listening: int  # listening socket for launchers
    path: str  # of that socket
    reserved: list[int]  # placeholders at the descriptor numbers that the first run will use
    leader: tuple[int, int]  # session leader, with which it ends: pid and start time (``processes.start_ticks``)
    leader_pidfd: int | None  # None if the kernel has no pidfds
    seconds: float  # lifetime without a run


class AllowedState(TypedDict):
    """What the import of known packages may change in a process."""

    tops: list[str]  # top-level modules
    sets: list[str]  # environment variables
    generators: list[str]  # random generators


class ZygoteConfig(TypedDict):
    """Start configuration of a zygote, made by ``ZygoteClient``."""

    supervisor: int  # pid
    forks: bool  # False: it imports nothing, and every rank is a new interpreter
    modules: list[str]  # to preload
    asked: list[str]  # those of ``modules`` that the user has named
    fallback: list[str]  # modules to preload if ``modules`` are not fork-safe; empty for none
    allowed: AllowedState  # permitted changes by ``modules``, if there is a fallback
    reads: list[str]  # environment variables that ``modules`` read
    settings: dict[str, str]  # environment variables during the imports
    first: str  # first entry of sys.path in the ranks
    folders: list[str]  # user folders that the program puts before installed packages in sys.path
    remove: list[str]  # temporary paths to delete at the end
    shielded: list[int]  # signals to ignore
    blocked: list[int]  # signal mask of new ranks
    ignores_children: bool  # whether new ranks ignore SIGCHLD
    failed: str | None  # why it has restarted with its fallback
    unsafe: str | None  # why it does not fork
    warm: WarmEndpoint | None  # of a zygote that outlives the run
    guarded: bool  # whether a guardian is its parent, and other runs share its modules


class _Rank(TypedDict):
    rank: int
    typed: str  # the target as the user typed it
    path: str  # of the target's file; "" without one
    args: list[str]
    env: dict[str, str]
    cpus: list[int] | None


class ProgramJob(_Rank):
    kind: Literal["program"]


class RankFacts(TypedDict):
    """Values for a target function's parameters of these names."""

    rank: int
    local_rank: int
    node_rank: int
    nnodes: int
    world_size: int
    local_world_size: int
    device: str


class PythonJob(_Rank):
    """The user's Python code; ``path``, ``module`` and ``function`` are "" where the kind has none."""

    kind: Literal["script", "main", "module", "function"]
    module: str
    function: str
    first: str  # first entry of sys.path
    facts: RankFacts
    first_here: bool  # local rank 0
    backend: str | None
    init_method: str | None
    error_file: str | None  # for the exception that ends the rank
    trace_file: str | None  # for the last collectives
    trace_after: float  # minimum age of the first process group, in seconds
    oom_snapshot: str  # file for the CUDA allocator's state when out of memory; "" for none
    oom_summary: str  # file for its summary
    debugger: str  # path of the debug server's socket; "" without --debug
    debugpy: bool  # listen for an editor
    post_mortem: bool  # enter the debugger at the exception that ends the rank
    patient: bool  # process groups without a timeout get one of a day
    title: str  # process title in ps


RankJob = ProgramJob | PythonJob


class SpawnRequest(TypedDict):
    """Start a rank: by fork or, if that is unsafe or disabled, as a fresh interpreter."""

    op: Literal["spawn"]
    rank: int
    job: RankJob
    fds: list[str]  # purposes of the attached descriptors


class ServeStore(TypedDict):
    """Start a store process on the attached listening socket; end the previous one."""

    op: Literal["store"]


class SweepRequest(TypedDict):
    """Kill all leftover processes: after ``patience`` SIGTERM, after ``grace`` SIGKILL, in seconds."""

    op: Literal["sweep"]
    grace: float
    patience: float


class RemovePathRequest(TypedDict):
    """Delete a temporary path at the end, too."""

    op: Literal["remove"]
    path: str


class ReadyMessage(TypedDict):
    """The zygote can start ranks; a pidfd is attached if it is not the launcher's child."""

    op: Literal["ready"]
    forks: bool
    failed: str | None
    unsafe: str | None
    seconds: float  # duration of the imports
    stores: bool  # whether a fork of it can hold the job's store
    pid: int


class ImportFailedMessage(TypedDict):
    """A module that the user named in ``--preload`` cannot be imported."""

    op: Literal["refused"]
    message: str


class SpawnedMessage(TypedDict):
    """A rank has a process; its pidfd is attached if the kernel has pidfds."""

    op: Literal["spawned"]
    rank: int
    pid: int


class SpawnFailedMessage(TypedDict):
    """A rank got no process."""

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
    """The store process has ended unexpectedly."""

    op: Literal["store exited"]
    pid: int
    status: int


class SweptMessage(TypedDict):
    op: Literal["swept"]
    found: list[str]
    stuck: list[str]


class SignalledMessage(TypedDict):
    """The zygote has received a signal: from a rank or one of its children, or sent to the whole process tree."""

    op: Literal["signalled"]
    number: int
    rank: int | None


class WarmOrder(TypedDict):
    """The run that a launcher requests a zygote for; sent in a memfd, because the environment may be long."""

    config: ZygoteConfig
    environment: dict[str, str]
    fingerprint: dict[str, str]
    descriptors: list[int]  # target numbers of the launcher's descriptors: 0, 1, 2 and other inherited ones


class RunRequest(TypedDict):
    """Fork a zygote; attached: the order, the zygote's control socket, the guardian's socket to the launcher."""

    op: Literal["run"]


class ZygoteOffer(TypedDict):
    """A run's zygote waits for ``FdHandover`` on its control socket; its pidfd is attached as in ``SpawnedMessage``."""

    op: Literal["take"]
    pid: int


class FdHandover(TypedDict):
    """The launcher's ``descriptors`` are attached."""

    op: Literal["given"]


class StatusRequest(TypedDict):
    """Ask a warm zygote for its status."""

    op: Literal["look"]


class StopRequest(TypedDict):
    """Exit, after the current runs; the reply is a ``WarmStatus``."""

    op: Literal["stop"]


class WarmStatus(TypedDict):
    """Status of a warm zygote."""

    op: Literal["looked"]
    pid: int
    began: float  # seconds since the epoch
    left: float | None  # seconds until it exits; None while a run uses it
    running: int  # current runs
    served: int  # all runs so far
    modules: list[str]
    folder: str  # working folder of it and its runs
    ending: bool


class RunDeclined(TypedDict):
    """A warm zygote cannot serve this run."""

    op: Literal["declined"]
    reason: str


class GuardianExited(TypedDict):
    """No process of a guardian's run is left, but those that are ``stuck``."""

    op: Literal["ended"]
    status: int  # wait status of the run's zygote
    stuck: list[str]


ToZygote = ServeStore | SpawnRequest | SweepRequest | RemovePathRequest
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
