"""What a feature is, and what it may add. The core and the command line know no feature by its name.

A feature is a folder in ``features/`` and a line in ``features/__init__.py``. Its ``feature.py`` defines ``FEATURE``:
an instance of a subclass of ``Feature``, which describes what it adds to ddplaunch. Every ``feature.py`` is imported
whenever ddplaunch starts, so it imports the other files of its folder inside its methods.

A *plug-in* is a feature of an installed package: docs/plugins.md. ``feature_registry`` has them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from ddplaunch.base.event_loop import EventLoop
    from ddplaunch.base.options import OptionGroup, Options
    from ddplaunch.core.agent.node_context import NodeContext
    from ddplaunch.core.agent.node_ranks import NodeRanks
    from ddplaunch.core.agent.process_tree import ProcessTree
    from ddplaunch.core.agent.zygote_process import ZygoteSource
    from ddplaunch.core.control_socket.request import ServedJob
    from ddplaunch.core.deadlines import Now
    from ddplaunch.core.events import Event
    from ddplaunch.core.failures import FailureReport, JobResult, RankFailure
    from ddplaunch.core.isolation import IsolatedLoop
    from ddplaunch.core.job.job_attempt import JobAttempt, StopCause
    from ddplaunch.core.job.node_table import NodeTable
    from ddplaunch.core.job.time_limits import TimeLimits
    from ddplaunch.core.job_config import JobConfig
    from ddplaunch.core.messages import CheckRequest, FromNode, Message
    from ddplaunch.core.node_config import NodeConfig, ScreenOptions
    from ddplaunch.core.output.run_log import RunLog
    from ddplaunch.core.output.screen import Screen
    from ddplaunch.core.rank.zygote_messages import RankJob
    from ddplaunch.core.zygote_plan import ZygotePlan
    from ddplaunch.system.clusters.cluster_env import ClusterEnv
    from ddplaunch.system.plan.plan import Plan
    from ddplaunch.system.plan.planner import PlanSpec
    from ddplaunch.system.plan.rank_layout import Rank
    from ddplaunch.system.target.target import Target

S = TypeVar("S", bound="NodeSide")


class Command(NamedTuple):
    """A command of ddplaunch: a click command with this name in ``module``, which is imported on use."""

    name: str
    summary: str  # in `ddplaunch --help`
    module: str = "command"  # in the feature's folder: command.py
    heading: str = "Other"  # of `ddplaunch --help`
    place: int = 5  # under the heading: the smallest is first; equal ones are in the order of the features
    also: tuple[str, ...] = ()  # what users of other programs type for it: an error suggests it then
    in_config: bool = False  # configuration files may have a table of its defaults


class RankSide(NamedTuple):
    """A feature's part in the process of one rank, which runs before and after the program, or in its signal handlers.

    The file has a class ``Side``, which is made with the ``RankRunner`` and ``settings`` as keyword arguments, and has
    any of the methods ``begin`` (before the program), ``failed`` (with the exception that has ended the program; the
    rank lives on until it returns), ``done`` (the program has succeeded) and ``leave`` (before the interpreter's end).
    The file is loaded by path, without a name in ``sys.modules``; the rules of ``core/rank/rank_runner.py`` apply.
    """

    file: str  # below the package, without suffix, in a folder "rank"; of a plug-in: the absolute path
    settings: Mapping[str, object]  # plain data


class SchedulerEntry(NamedTuple):
    """A batch scheduler: the value of ``--scheduler``, and its class in ``module``, which is imported on use."""

    name: str
    title: str
    module: str  # in the feature's folder
    kind: str
    command: str | None = None  # the module in that folder with its own ``submit``, for jobs without a script
    may_find: Callable[[], bool] | None = None  # whether its class can find jobs that are not on record; cheap


class NodeSide:
    """A feature's part in the launcher of one node, for one job. A subclass overrides only the hooks that it needs.

    A side that raises is reported once as a bug and gets no further calls but ``close`` and ``finish``.
    """

    def observe(self, event: Event) -> None:
        """Called with every event of the job, in the launcher's own thread; must not block."""

    def on_message(self, message: Message) -> None:
        """Called with every message of node 0, once the core has handled it; not with a ``CheckRequest``."""

    def on_check(self, request: CheckRequest) -> bool:
        """Check this node before an attempt; return whether the side replies: ``CheckPassed`` or ``NodeStartError``.

        If no side replies, for example because it has raised, the core replies that the check has passed.
        """
        return False

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        """Called when an attempt begins, before its ranks are requested from the zygote."""

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide | None:
        """Return the feature's part in the process of a Python rank, just before the rank starts; None: no part."""
        return None

    def complete_job(self, job: RankJob) -> None:
        """Change the arguments and variables of a rank, right before it is started."""

    def on_output(self, rank: int) -> None:
        """Called for each chunk that a rank prints; must be cheap."""

    def explain_failure(self, failure: RankFailure, peak_bytes: int) -> str | None:
        """Return the hint for a rank's failure, four lines at most; None if there is nothing to add.

        ``peak_bytes``: the most memory that it or one of its children used; 0 is unknown.
        """
        return None

    def find_exception(self, rank: int) -> tuple[str, str] | None:
        """Return message and traceback of an exception that a rank is handling, and that will end it.

        None if none is known.
        """
        return None

    def on_crash(self, rank: int) -> bool:
        """Called when native code has failed in a rank, which waits in the handler of the fatal signal.

        Return whether the side will soon let the rank go on, by ``NodeRanks.release_crashed``. If no side does, the
        core does.
        """
        return False

    def on_resume(self) -> None:
        """Called when the job continues after Ctrl-Z, and when a rank begins or stops waiting for a user."""

    def on_inspect_key(self) -> None:
        """Called for the first Ctrl-\\ in the terminal; a second one soon after stops the job."""

    def on_signal_after_end(self) -> bool:
        """Called for a signal to the launcher after ``JobEnded``; return whether the signal ends a wait of the side.

        If no side returns True, the launcher soon waits for nothing more.
        """
        return False

    def close(self) -> None:
        """Called when the job has ended, or the launcher has failed, before the result is printed."""

    def finish(self) -> None:
        """Called after the result is printed; it may take some seconds."""


class FeatureContext(Struct, frozen=True):
    """What the node side of a feature may use of the launcher."""

    plan: Plan  # of this node, before it has joined the others
    config: NodeConfig
    job_config: JobConfig
    options: Options
    cluster_env: ClusterEnv | None  # the cluster that supplies options; None if none does
    job: ServedJob
    node: NodeContext
    tree: ProcessTree
    screen: Screen
    log: RunLog
    loop: IsolatedLoop  # an exception in a callback ends only this side: then ``loop.on_error`` is called
    earlier: tuple[NodeSide, ...]  # the sides of features above this one in the list

    def find(self, kind: type[S]) -> S | None:
        """Return the side of another feature; None if the job has none."""
        return next((side for side in self.earlier if isinstance(side, kind)), None)


class ReplacementLauncher(ABC):
    """Runs the job in place of this launcher, for example on other hosts."""

    @abstractmethod
    def check(self) -> None:
        """Raise UsageError if the options are invalid, or contradict each other."""

    @abstractmethod
    def run(self, target: Target, run_id: str) -> int:
        """Run the job, and return its exit code."""

    @abstractmethod
    def options_for_dry_run(self) -> tuple[Options, str]:
        """Return the options with the values that this object adds for a dry run, and a note on them."""

    @abstractmethod
    def complete_plan(self, plan: Plan, options: Options) -> Plan:
        """Return the plan of a dry run, completed with the known facts about the machines."""


class RpcCall(NamedTuple):
    """A request to all nodes with ranks."""

    kind: str  # its name: ``Feature.rpc_kinds``
    request: object
    timeout_s: float


class JobSide:
    """A feature's part in the decisions of one job, on node 0; it has no sockets, timers or clock of its own.

    A side that raises is reported once as a bug, and is not called again.
    """

    def on_message(self, node: int, message: FromNode) -> None:
        """Called with a node's messages about the running attempt, once the core has handled them.

        A ``FeatureMessage`` may come at any time. Raises ProtocolError if the node cannot have sent the message; then
        the node counts as lost.
        """

    def on_deadline(self, name: str) -> None:
        """Called when a deadline is due that the side has set: ``JobContext.set_deadline``."""

    def before_start(self, attempt: int) -> CheckRequest | None:
        """Return a request to send to every node before the attempt, which waits for the replies; None for none."""
        return None

    def holds_end(self) -> bool:
        """Return whether the job goes on although all ranks have succeeded, until ``JobContext.allow_end``."""
        return False

    def holds_stop(self, signal: int) -> bool:
        """Return whether a job goes on although all ranks were stopped, until ``JobContext.allow_end``.

        ``signal``: the signal that the ranks got. Not called after a second request to stop.
        """
        return False

    def may_explain(self, failure: RankFailure) -> bool:
        """Return whether the end of another program, which is reported soon, may have made this rank fail."""
        return False

    def on_node_lost(self, node: int, text: str) -> None:
        """Called when a node is lost, before the job decides what that means; ``text`` says why."""

    def on_attempt_start(self, attempt: int) -> None:
        """Called when an attempt begins, before the nodes start its ranks."""

    def before_stop(self, attempt: JobAttempt) -> RpcCall | None:
        """Return a request to send to all nodes before the ranks are stopped; None for none.

        It may be called again before the ranks are stopped. Only the first request of an attempt is sent.
        """
        return None

    def on_stop_reply(self, reply: Any) -> None:
        """Called with the merged reply to the request of ``before_stop``; then the ranks are stopped."""

    def blame(self, report: FailureReport, failures: Sequence[RankFailure]) -> FailureReport:
        """Add to the report which rank caused the failures, if known: all reported ranks failed because of another."""
        return report

    def remark(self, *, time_limit: bool) -> str | None:
        """Return a remark for the result of a stopped job; ``time_limit``: a time limit stopped it, else a signal."""
        return None

    def on_job_end(self, result: JobResult) -> None:
        """Called when the job ends, before the nodes get the result."""


class JobContext(ABC):
    """What the job side of a feature may use of the job, in its hooks and in the handlers of replies.

    What a hook requests is done after the hook has returned: a feature never runs within a decision of the job.
    """

    config: JobConfig
    options: Options  # of node 0
    run_id: str
    nodes: NodeTable  # read only
    limits: TimeLimits  # read only

    @property
    @abstractmethod
    def now(self) -> Now:
        """The moment of the event that is being handled."""

    @abstractmethod
    def send(self, node_rank: int, message: Message) -> None:
        """Send a message to a node."""

    @abstractmethod
    def send_to_all(self, message: Message) -> None:
        """Send a message to all nodes."""

    @abstractmethod
    def report_stall(self, since: float, text: str) -> None:
        """Announce to all nodes that the job makes no progress; ``text`` is the note to print, or ""."""

    @abstractmethod
    def set_deadline(self, name: str, seconds: float) -> None:
        """Have ``on_deadline`` called with this name after this time; replaces the deadline of the same name."""

    @abstractmethod
    def cancel_deadlines(self, *names: str) -> None:
        """Cancel these deadlines of the side."""

    @abstractmethod
    def gather(self, kind: str, request: object, on_done: Callable[[Any], None]) -> None:
        """Send a request of this kind to all nodes with ranks; ``on_done`` gets the merged reply."""

    @abstractmethod
    def stop_attempt(self, cause: StopCause) -> None:
        """Stop the ranks, if they run; the failure of another program also ends a job that is about to start them."""

    @abstractmethod
    def allow_end(self) -> None:
        """Let the job end if only ``JobSide.holds_end`` or ``holds_stop`` delays its end; the hook is called again."""


class Feature:
    """Base class of features. A subclass overrides only the attributes and hooks that it needs."""

    requires: tuple[str, ...] = ()
    """The features that this one needs, above it in the list: if one is missing, this feature is left out too."""

    options: tuple[type[OptionGroup], ...] = ()
    """Groups of its options of ``run``."""

    commands: tuple[Command, ...] = ()

    requests: tuple[str, ...] = ()
    """Its modules with requests to a running job: "request" is request.py. Imported when the first client connects."""

    rpc_kinds: tuple[str, ...] = ()
    """Its modules with a kind of request to all nodes, as ``KIND``. Imported with the first such request."""

    messages: tuple[str, ...] = ()
    """Its modules with subclasses of ``FromNode`` and ``FromNodeZero``. Imported when nodes join."""

    schedulers: tuple[SchedulerEntry, ...] = ()

    locators: tuple[str, ...] = ()
    """Its modules that find runs, as ``LOCATOR``, a ``RunLocator``. Imported when a command looks for its run."""

    def rewrite_words(self, words: list[str], known: Mapping[str, bool]) -> list[str]:
        """Return the words of a command line of ``run`` before they are split. Raises UsageError.

        ``known``: every spelling of every option, and whether it takes a value.
        """
        return words

    def adjust_spec(self, options: Options, spec: PlanSpec, target: Target, *, is_remote: bool) -> PlanSpec:
        """Return the planner's input with the devices that this feature leaves to the ranks here. Raises UsageError.

        ``is_remote``: the ranks run elsewhere.
        """
        return spec

    def configure_job(self, config: JobConfig, options: Options) -> JobConfig:
        """Return the job config with what is derived from the options of this feature."""
        return config

    def check(self, options: Options, plan: Plan) -> Iterable[str]:
        """Raise UsageError if this node cannot do what the options request; return notes for the user."""
        return ()

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> Iterable[str]:
        """Return notes for a dry run. Raises UsageError as ``check``, but not for what depends on a remote machine."""
        return ()

    def run_instead(self, options: Options) -> ReplacementLauncher | None:
        """Return what runs the job in place of this launcher; None if the options do not request it."""
        return None

    def make_screen(self, loop: EventLoop, options: Options, how: ScreenOptions) -> Screen | None:
        """Return a screen to use in place of the default one; None if the job does not use the feature."""
        return None

    def plan_zygote(self, options: Options, plan: Plan, zygote_plan: ZygotePlan) -> ZygotePlan:
        """Return the plan of this node's zygote; ``zygote_plan`` is the plan without this feature.

        Not called with ``--start exec``.
        """
        return zygote_plan

    def make_zygote_source(self, options: Options) -> ZygoteSource | None:
        """Return what provides the zygotes of this node; None if the feature provides none for this job.

        Raises UsageError if the options of the feature are wrong.
        """
        return None

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        """Return the feature's part in the launcher of this job; None if the job does not use the feature."""
        return None

    def make_job_side(self, context: JobContext) -> JobSide | None:
        """Return the feature's part in the decisions of the job; None if the job does not use the feature."""
        return None
