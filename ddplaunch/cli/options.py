"""The options of ``ddplaunch run``: each declared once, with its type, spelling and help; and their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli import values
from ddplaunch.cli.option import Option
from ddplaunch.cli.values import UNBOUNDED, WEEK_S, number_reader, parse_seconds, to_argv
from ddplaunch.control import MIN_HEARTBEAT_TIMEOUT_S
from ddplaunch.control.rules import DEFAULT_GPU_MEMORY_TIMEOUT_S, JobConfig
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.output.prefix import DEFAULT_PREFIX as DEFAULT_PREFIX
from ddplaunch.plan.numbers import parse_int
from ddplaunch.plan.plan import DEFAULT_ROLE

if TYPE_CHECKING:
    from typing import Any, TypedDict

    class Inferred(TypedDict, total=False):
        """What hosts and surroundings can say where the user does not."""

        cluster: str
        nnodes: tuple[int, int]
        node_rank: int | None
        nproc: str | None
        master_addr: str | None
        master_port: int | None
        run_id: str | None
        control: str


SECTIONS = {
    heading: names.split()
    for heading, names in {
        "Target": "--module --no-python --pass-local-rank",
        "Ranks and devices": "--nproc --gpus --oversubscribe --virtual-local-rank --bind",
        "Several nodes": "--nnodes --node-rank --master-addr --master-port --interface --cluster --run-id --token",
        "Several nodes by SSH": "--hosts --hostfile --include --exclude --env --remote-python",
        "Connections between nodes": "--control --control-port --join-timeout --heartbeat-timeout --allow-mismatch",
        "Elastic jobs (--nnodes 2:4) and spares": "--spares --join-window --max-membership-changes --grow",
        "Starting ranks": "--backend --init-method --start --preload --warm --check --gpu-memory-timeout --role",
        "Stopping and restarting": "--grace --max-restarts --restart-on --restart-backoff --min-uptime --checkpoint",
        "Time limits": "--timeout --stall-timeout --on-stall --straggler-timeout",
        "Preemption": "--preempt-signal --preempt-grace --preempt-forward",
        "Sidecar programs and who is told": "--tensorboard --sidecar --notify --metrics",
        "Debugging": "--debug --debug-timeout --post-mortem --debugpy --oom-report",
        "Output": "--show --prefix --merge --stdin --ui --log-dir --log-json --no-history --no-inspect",
        "Dry run and help": "--no-config --dry-run --json --help --help-all",
    }.items()
}
"""The headings of ``--help-all``, and the options under each."""

SSH_OPTIONS = tuple(name[2:].replace("-", "_") for name in SECTIONS["Several nodes by SSH"])
"""Options by which one machine starts the others."""

# fmt: off
COMMON_OPTIONS = ("--module", "--nproc", "--gpus", "--nnodes", "--node-rank", "--master-addr", "--hosts", "--max-restarts",
          "--log-dir", "--dry-run", "--help", "--help-all")
# fmt: on
"""The options that most people need."""


class OptionSource(Enum):
    """Where the value of an option comes from."""

    TYPED = "typed"
    VARIABLE = "variable"
    FILE = "file"
    HOSTS = "hosts"
    CLUSTER = "surroundings"
    DEFAULT = "default"


LOG_JSON_VARIABLE = "DDPLAUNCH_LOG_JSON"
"""The variable for ``--log-json``."""


WARM_VARIABLE = "DDPLAUNCH_WARM"
"""The variable for ``--warm``, or with 0 for ``--no-warm``."""


def _option(spelling: str, help: str, read: Any = None, **how: Any) -> Any:
    """An option with a value: a name and what the help calls its value, or the only values, as in "tcp|none"."""
    name, _, metavar = spelling.partition(" ")
    if "|" in metavar:
        how["choices"] = metavar.split("|")
        metavar = ""
    return Option([name], help, read, metavar=metavar or None, **how)


def _flag(spellings: str, help: str, **how: Any) -> Any:
    return Option(spellings.split(), help, is_flag=True, **how)


def _argument(name: str, *, rest: bool = False) -> Any:
    return Option([name], takes_rest=rest, completion="any")


def _seconds(name: str, default: float | None, help: str, read: Any = values.seconds) -> Any:
    return _option(f"{name} TIME", help, read, **({} if default is None else {"default": f"{default:g}"}))


_port = number_reader(parse_int, 1, 65535, "a port from 1 to 65535")
_any_port = number_reader(parse_int, 0, 65535, "a port from 1 to 65535, or 0 for any free one")
_count = number_reader(parse_int, 0, UNBOUNDED, "a number from 0 up")
_heartbeat_timeout = number_reader(
    parse_seconds,
    MIN_HEARTBEAT_TIMEOUT_S,
    WEEK_S,
    f"{MIN_HEARTBEAT_TIMEOUT_S:g} or more seconds: with fewer, a busy node counts as lost",
)


@dataclass(frozen=True)
class RunOptions:
    """The values of all options and arguments. What a field's default is declares the option."""

    module: bool = _flag("-m --module", "TARGET is a module, as for `python -m`.")
    no_python: bool = _flag("--no-python", "TARGET is a program, not Python.")
    pass_local_rank: bool = _flag(
        "--pass-local-rank",
        "Add --local-rank=N as the first argument, or --local_rank=N where the script has only that.",
    )
    nproc: str | None = _option(
        "--nproc N",
        "Ranks on each node: a number, a list like 8,8,4, or auto, gpu, cpu.  "
        "[default: auto, the number of visible GPUs, or 1]",
    )
    gpus: str | None = _option(
        "--gpus LIST", "Use these GPUs, in this order: indices from `ddplaunch devices`, or UUIDs. none uses CPUs."
    )
    oversubscribe: bool = _flag("--oversubscribe", "Let several ranks share a GPU.")
    virtual_local_rank: bool = _flag(
        "--virtual-local-rank", "Give each rank LOCAL_RANK 0 and show it only its own GPU."
    )
    bind: str | None = _option("--bind", "Pin each rank to the CPUs beside its GPU.", choices=["numa"])
    cluster: str | None = _option(
        "--cluster NAME",
        "Read the nodes from the variables of this system: slurm, openmpi, …; none reads no variables.  "
        "[default: the system that started this process]",
    )
    nnodes: tuple[int, int] = _option(
        "--nnodes N",
        "Number of nodes. 2:4 is any number from 2 to 4, and it may change while the job runs.",
        values.parse_nnodes,
        default="1",
    )
    node_rank: int | str | None = _option(
        "--node-rank I",
        "Rank of this node, from 0. With auto, node 0 is the one at --master-addr and numbers the others as they join.",
        values.parse_node_rank,
    )
    master_addr: str | None = _option("--master-addr HOST", "Address of node 0.  [default: 127.0.0.1 on one node]")
    master_port: int | None = _option(
        "--master-port PORT",
        "Port of torch's store, on node 0.  [default: 29500; on one node any free port]",
        _any_port,
    )
    interface: str | None = _option(
        "--interface NAME", "Network interface to use, like ib0.  [default: the one to node 0]"
    )
    run_id: str | None = _option(
        "--run-id NAME", "Name of the job: only nodes with the same name join.", values.parse_name
    )
    token: str | None = _option(
        "--token SECRET",
        "Secret that a node needs to join; DDPLAUNCH_TOKEN keeps it out of `ps`.",
        envvar="DDPLAUNCH_TOKEN",
    )
    hosts: str | None = _option("--hosts A:4,B:4", "Start the job on these hosts by SSH, with this many ranks on each.")
    hostfile: str | None = _option(
        "--hostfile FILE", "Read the hosts from FILE, one per line: n1 slots=4", completion="file"
    )
    include: str | None = _option("--include A@B:0,2", "Use only these hosts, or these slots of them.")
    exclude: str | None = _option("--exclude A@B:0,2", "Leave out these hosts, or these slots of them.")
    env: tuple[str, ...] = _option(
        "--env NAME[=VALUE]",
        "Set a variable on the hosts, in addition to LD_LIBRARY_PATH, PYTHONPATH, NCCL_* and others; may be repeated.",
        multiple=True,
    )
    remote_python: str | None = _option(
        "--remote-python PATH", "Python on the hosts.  [default: the path of this Python]"
    )
    control: str = _option(
        "--control tcp|none", "How the nodes stay in contact. With none, each node runs its share alone.", default="tcp"
    )
    control_port: int | None = _option(
        "--control-port PORT", "Port where node 0 listens for the other nodes.  [default: master port + 1]", _port
    )
    join_timeout: float = _seconds("--join-timeout", JobConfig.join_timeout, "Wait this long for all nodes.")
    heartbeat_timeout: float = _seconds(
        "--heartbeat-timeout",
        JobConfig.heartbeat_timeout,
        "A node that is silent for this long is lost. The value of node 0 counts.",
        _heartbeat_timeout,
    )
    allow_mismatch: bool = _flag("--allow-mismatch", "Continue when versions differ between nodes, with a note.")
    spares: int = _option(
        "--spares N",
        "Take N nodes more than --nnodes. They wait, and one takes the place of each node that is lost or fails.",
        _count,
        default="0",
    )
    join_window: float = _seconds(
        "--join-window", JobConfig.join_window, "Once enough nodes have joined, wait this long for more."
    )
    max_membership_changes: int = _option(
        "--max-membership-changes N",
        "Continue at most N times with nodes lost or added.",
        _count,
        default=str(JobConfig.max_membership_changes),
    )
    grow: bool = _flag("--grow", "Restart at once when another node joins.")
    backend: str | None = _option(
        "--backend NAME", "Initialise the process group before the target runs: nccl, gloo, auto, …"
    )
    init_method: str | None = _option(
        "--init-method URL", "Where ranks find each other: env://, tcp://host:port or file:///path.  [default: env://]"
    )
    start: str = _option(
        "--start auto|zygote|exec",
        "zygote forks ranks from one process that has imported torch; exec starts a new Python for each.",
        default="auto",
    )
    preload: str | None = _option(
        "--preload A,B",
        "Import these modules before forking; or auto: torch and what is known; torch; none.  [default: auto]",
    )
    warm: bool | None = _flag(
        "--warm",
        "Keep what the zygote has imported for the next runs: 10 minutes, or [run] warm in your own ddplaunch.toml.",
        negative_spelling="--no-warm",
        envvar=WARM_VARIABLE,
    )
    check: bool = _flag(
        "--check",
        "Before each attempt, every node checks its disks, its memory and its GPUs; an elastic job leaves out a node "
        "that fails.",
    )
    gpu_memory_timeout: float | None = _seconds(
        "--gpu-memory-timeout",
        None,
        f"With --check: wait this long for GPU memory that is still in use.  [default: {DEFAULT_GPU_MEMORY_TIMEOUT_S:g}]",
    )
    role: str = _option("--role NAME", "ROLE_NAME of the ranks.", default=DEFAULT_ROLE)
    grace: float = _seconds("--grace", JobConfig.grace, "Time for ranks to stop, between SIGTERM and SIGKILL.")
    max_restarts: int = _option(
        "--max-restarts N",
        "Restart all ranks after a failure, at most N times.",
        _count,
        default=str(JobConfig.max_restarts),
    )
    restart_on: str = _option(
        "--restart-on any|transient|always",
        "any: stop restarting when a rank fails twice in the same way; transient: restart only after a signal, a "
        "lost connection, or when the host ran out of memory; always: restart after every failure.",
        default=JobConfig.restart_on,
    )
    restart_backoff: float = _seconds(
        "--restart-backoff",
        JobConfig.restart_backoff,
        "Wait this long before a restart; twice as long after each early failure.",
    )
    min_uptime: float = _seconds(
        "--min-uptime", JobConfig.min_uptime, "Give up after three attempts in a row that lasted less than this."
    )
    checkpoint: str | None = _option(
        "--checkpoint PATTERN",
        "The program's checkpoints, like 'ckpt/*': `ddplaunch report` counts what a failed attempt did after its last "
        "one as lost.",
        completion="any",
    )
    timeout: float | None = _seconds(
        "--timeout", None, "Stop the job after this time, like 90 (seconds), 10m or 2h.", values.time_limit
    )
    stall_timeout: float | None = _seconds(
        "--stall-timeout",
        None,
        "Stop the job when nothing gets on for this long: no output, no collective, and the ranks that others wait for "
        "are idle.  [default: a note, after 24 s at the soonest]",
        values.time_limit,
    )
    on_stall: str | None = _option(
        "--on-stall stop|restart|report",
        "After --stall-timeout: stop the job, restart all ranks (--max-restarts), or only say who waits for whom.  "
        "[default: stop]",
    )
    straggler_timeout: float | None = _seconds(
        "--straggler-timeout",
        None,
        "End ranks that still run this long after the last of the others has ended.",
        values.time_limit,
    )
    preempt_signal: int | None = _option(
        "--preempt-signal SIGNAL",
        "Signal by which the scheduler warns, or none. Ranks ask ddplaunch.runtime.preempted().",
        values.parse_signal,
        default="USR2",
    )
    preempt_grace: float = _seconds(
        "--preempt-grace",
        JobConfig.preempt_grace,
        "Time for ranks to save their work, between the warning and SIGTERM.",
    )
    preempt_forward: int | None = _option(
        "--preempt-forward SIGNAL", "Send each rank this signal when the warning comes.", values.parse_signal
    )
    tensorboard: str | None = _option(
        "--tensorboard DIR",
        "Run TensorBoard on DIR while the job runs, for this machine only, and print its address.",
        completion="folder",
    )
    sidecar: tuple[str, ...] = _option(
        "--sidecar COMMAND",
        "Run a program beside rank 0 while the job runs; may be repeated.",
        values.check_commands,
        multiple=True,
    )
    notify: tuple[str, ...] = _option(
        "--notify COMMAND",
        "Run this on node 0 when the job starts, fails, restarts, stalls, is preempted or ends, with the event as JSON "
        "on its input; may be repeated.",
        values.check_commands,
        multiple=True,
    )
    metrics: str | None = _option(
        "--metrics FILE.prom",
        "Write figures of the job into this file on each node, every 15 seconds, for Prometheus' textfile collector.",
        values.check_prom_path,
        completion="file",
    )
    show: str = _option(
        "--show RANKS",
        "Show the output of these ranks: all, none, 0,3, or local:0 on every node. 0/err is only its stderr.",
        default="all",
    )
    prefix: str = _option(
        "--prefix TEMPLATE",
        "Begin each line of a rank with this: text with {rank}, {local_rank}, {node_rank}, {host} or {role}; none "
        "leaves it out.",
        values.parse_prefix,
        default=DEFAULT_PREFIX,
        envvar="DDPLAUNCH_PREFIX",
    )
    merge: bool | None = _flag(
        "--merge",
        "Show a line that several ranks print within 0.2 seconds once, as [0-7] LINE.  [default: in a terminal only]",
        negative_spelling="--no-merge",
    )
    stdin: int | None = _option(
        "--stdin RANK", "Connect the terminal to this rank, for pdb. A single rank always has it.", values.integer
    )
    debug: bool = _flag(
        "--debug",
        "Let ranks wait at a breakpoint for `ddplaunch debug`, also without a terminal here; process groups made "
        "without a timeout get a day.",
    )
    debug_timeout: float = _seconds(
        "--debug-timeout",
        3600.0,
        "Let a rank in its debugger run on when nobody types for this long.",
        values.time_limit,
    )
    post_mortem: bool = _flag("--post-mortem", "Keep the first rank that fails, at its exception, for the debugger.")
    debugpy: str | None = _option(
        "--debugpy RANKS",
        "Let an editor attach to these ranks by debugpy, from this machine alone: 0,3. Their entries for launch.json "
        "are printed.",
    )
    oom_report: bool = _flag(
        "--oom-report",
        "When CUDA runs out of memory, say by which lines of the program the largest blocks were made, and keep a "
        "snapshot. Each allocation takes some microseconds more.",
    )
    ui: bool = _flag("--ui", "Show below the output what each rank does. `ddplaunch top` shows it in another terminal.")
    log_dir: str | None = _option(
        "--log-dir DIR",
        "Write a log folder into DIR: plan, events, the output of each rank, failures.",
        completion="folder",
    )
    log_json: bool = _flag(
        "--log-json", "Write what ddplaunch itself says as JSON, an object a line, on stderr.", envvar=LOG_JSON_VARIABLE
    )
    no_history: bool = _flag("--no-history", "Keep no record of this run for `ddplaunch ps`, `logs` and `report`.")
    no_inspect: bool = _flag(
        "--no-inspect", "Prepare no rank for `ddplaunch stacks`, and take no stacks after a failure."
    )
    no_config: bool = _flag("--no-config", "Read no defaults from pyproject.toml.")
    dry_run: bool = _flag("--dry-run", "Print the plan and start nothing.")
    as_json: bool = _flag("--json as_json", "With --dry-run: print the plan as JSON.")
    target: str = _argument("target")
    args: tuple[str, ...] = _argument("args", rest=True)
    sources: Mapping[str, OptionSource] = field(default_factory=dict)  # of each value, by the option's name

    def is_set(self, name: str) -> bool:
        """Whether the user has set it, by an option or a variable."""
        return self.sources[name] in (OptionSource.TYPED, OptionSource.VARIABLE)

    @property
    def has_side_programs(self) -> bool:
        """Whether node 0 runs other programs of the user's than the ranks."""
        return bool(self.sidecar or self.notify) or self.tensorboard is not None

    @property
    def inferred_names(self) -> tuple[str, ...]:
        """The options that have their values from the surroundings."""
        return tuple(name for name, source in self.sources.items() if source is OptionSource.CLUSTER)

    def with_values(self, source: OptionSource, changes: Inferred) -> RunOptions:
        """Return a copy with these values, which come from ``source``."""
        return replace(self, **changes, sources={**self.sources, **dict.fromkeys(changes, source)})

    def with_defaults(self, source: OptionSource, defaults: Inferred) -> RunOptions:
        """Return a copy with those of these values that the user has not set; None is skipped.

        A project's defaults go before what was detected, and behind hosts that were typed.
        """
        before = (
            OptionSource.TYPED,
            OptionSource.VARIABLE,
            *([OptionSource.FILE] if source is OptionSource.CLUSTER else []),
        )
        unset: Any = {n: value for n, value in defaults.items() if value is not None and self.sources[n] not in before}
        return self.with_values(source, unset)

    def subset_for(self, kind: type[Any]) -> dict[str, Any]:
        """The values of the options that a class has as fields, by the same names."""
        return {name: getattr(self, name) for name in RunOptions.__match_args__ if name in kind.__match_args__}

    def to_argv(self, excluded: Collection[str]) -> Iterator[str]:
        """The options that the user or the project has set, as they are typed, but for those in ``excluded``."""
        for option in OPTIONS:
            chosen = not option.is_argument and (
                self.is_set(option.name) or self.sources[option.name] is OptionSource.FILE
            )
            if chosen and option.name not in excluded:
                yield from to_argv(option, getattr(self, option.name))


OPTIONS = tuple(each for each in vars(RunOptions).values() if isinstance(each, Option))
"""The options and arguments, in order."""
