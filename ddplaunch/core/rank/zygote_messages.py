"""Types of the JSON messages between launcher and zygote, of a rank's job, and of what features add to the zygote.

Imported for type checking only: neither the zygote nor a rank may load ``typing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Mapping
    from contextlib import AbstractContextManager

    from ddplaunch.core.rank.atexit_cleanup import AtexitCleanup
    from ddplaunch.core.rank.import_recorder import ImportRecorder
    from ddplaunch.system.processes.proc_utils import Usage
    from ddplaunch.system.target.signature import ArgumentValues


class Auditor(Protocol):
    """Checks what imports change in the zygote; its file has a class ``ImportAuditor``."""

    violation: str | None  # the first change that is not allowed

    def check_import(self, name: str) -> None: ...  # called after the import of each module
    def finish(self) -> None: ...  # called after all imports
    def restore(self, environ: dict[str, str]) -> None: ...  # called before a fresh zygote is exec'ed


class ForkFixups(Protocol):
    """A file that repairs values that preloaded modules took from the zygote, for use in a rank."""

    PREFIX_READERS: Mapping[str, str]  # modules that read all variables with a prefix
    RANK_READERS: Collection[str]  # the modules that it repairs because they read the variables of a rank

    def apply_fixups(self, modules: Mapping[str, Any]) -> None: ...  # called in each rank, with what is preloaded


class ServerConfig(TypedDict):
    """The settings of the server with which a zygote waits for its run or serves several runs."""

    file: str  # of the package, with ``make_server``, which returns a ``ZygoteServer``
    settings: Any  # its own


class ZygoteServer(Protocol):
    """Waits for one run, or forks zygotes for several runs; this process imports their modules once."""

    origins: AbstractContextManager[None]  # around the imports
    runs_served: int  # before this one

    def serve(
        self, fit: bool, cleanup: AtexitCleanup, recorder: ImportRecorder
    ) -> tuple[socket.socket, ZygoteConfig]: ...  # returns in the zygote of each run


class ZygoteConfig(TypedDict):
    """Start configuration of a zygote, made by ``zygote_client.make_zygote_config``."""

    parent_pid: int  # the launcher, or the guardian of a run from a warm zygote
    forks: bool  # False: it imports nothing, and every rank is a new interpreter
    modules: list[str]  # to preload
    user_modules: list[str]  # those of ``modules`` that the user has named
    fallback: list[str]  # modules to preload if ``modules`` are not fork-safe; empty for none
    known: list[str]  # the top-level modules that ``modules`` may load, if there is a fallback
    import_auditor: str  # file of the package with ``ImportAuditor``, as "features/x/rank/y"; used with a fallback
    fork_fixups: str  # file of the package with ``apply_fixups``, for each fork of modules; "" for none
    native_reads: str  # pattern of the variables that native code reads as it is loaded
    import_environment: dict[str, str]  # environment variables during the imports
    sys_path_0: str  # first entry of sys.path in the ranks
    remove_on_exit: list[str]  # temporary paths to delete at the end
    shielded_signals: list[int]  # to ignore: they are for the launcher, but all descendants get them
    blocked_signals: list[int]  # signal mask of new ranks
    ignores_sigchld: bool  # whether new ranks ignore SIGCHLD
    failed: str | None  # why it has restarted with its fallback
    unsafe: str | None  # why it does not fork
    server: ServerConfig | None  # of a zygote that waits for its run, or outlives it
    has_guardian: bool  # whether a guardian is its parent, and other runs share its modules


class _Place(TypedDict, total=False):
    """Settings of a process that differ from the zygote's."""

    cwd: str  # the folder in which a program starts; not that of a rank
    nice: int  # added to its niceness


class _Rank(_Place):
    rank: int
    target_text: str  # the target as the user typed it
    path: str  # of the target's file; "" without one
    args: list[str]
    env: dict[str, str]
    cpus: list[int] | None


class ProgramJob(_Rank):
    kind: Literal["program"]


class PythonJob(_Rank):
    """The user's Python code; ``path``, ``module`` and ``function`` are "" where the kind has none."""

    kind: Literal["script", "main", "module", "function"]
    module: str
    function: str
    sys_path_0: str  # first entry of sys.path
    facts: ArgumentValues
    is_first_local: bool  # local rank 0
    backend: str | None
    init_method: str | None
    error_file: str | None  # for the exception that ends the rank
    title: str  # process title in ps
    sides: list[tuple[str, Mapping[str, object]]]  # as ``RankSide`` of ``core/feature.py``


RankJob = ProgramJob | PythonJob


class SpawnRequest(TypedDict):
    """Start a rank: by fork or, if that is unsafe or disabled, as a fresh interpreter."""

    op: Literal["spawn"]
    rank: int
    job: RankJob
    fds: list[str]  # purposes of the attached descriptors: stdin, stdout, stderr, rank_channel, crash_socket


class ServeStore(TypedDict):
    """Start a store process on the attached listening socket; end the previous one."""

    op: Literal["serve_store"]


class SweepRequest(TypedDict):
    """Kill all leftover processes: SIGTERM after ``own_exit_timeout_s``, SIGKILL ``grace_s`` later."""

    op: Literal["sweep"]
    grace_s: float
    own_exit_timeout_s: float


class RemovePathRequest(TypedDict):
    """Delete this temporary path too when the zygote cleans up at its end."""

    op: Literal["remove_path"]
    path: str


class ReadyMessage(TypedDict):
    """The zygote can start ranks; a pidfd is attached if it is not the launcher's child."""

    op: Literal["ready"]
    forks: bool
    failed: str | None
    unsafe: str | None
    import_s: float  # duration of the imports
    can_serve_store: bool  # whether a fork of it can hold the job's store
    pid: int


class ImportFailedMessage(TypedDict):
    """A module that the user named in ``--preload`` cannot be imported."""

    op: Literal["import_failed"]
    message: str


class SpawnedMessage(TypedDict):
    """A rank has a process; its pidfd is attached if the kernel has pidfds."""

    op: Literal["spawned"]
    rank: int
    pid: int


class SpawnFailedMessage(TypedDict):
    """A rank got no process."""

    op: Literal["spawn_failed"]
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

    op: Literal["store_exited"]
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
