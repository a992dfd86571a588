"""The options of ``ddplaunch run``: their declarations, with spelling, type and help, and their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypedDict

from ddplaunch.cli import option_values
from ddplaunch.cli.option_declaration import Option
from ddplaunch.cli.option_values import UNBOUNDED, WEEK_S, number_reader, parse_seconds, to_argv
from ddplaunch.core.job import MIN_HEARTBEAT_TIMEOUT_S
from ddplaunch.core.job_config import DEFAULT_GPU_MEMORY_TIMEOUT_S, JobConfig
from ddplaunch.core.output.prefix import DEFAULT_PREFIX as DEFAULT_PREFIX
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.plan import DEFAULT_ROLE


class Inferred(TypedDict, total=False):
    """Values that hosts or the cluster environment can supply."""

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
        "Sidecars, notifications and metrics": "--tensorboard --sidecar --notify --metrics",
        "Debugging": "--debug --debug-timeout --post-mortem --debugpy --oom-report",
        "Output": "--show --prefix --merge --stdin --ui --log-dir --log-json --no-history --no-inspect",
        "Dry run and help": "--no-config --dry-run --json --help --help-all",
    }.items()
}
"""The headings of ``--help-all`` and the options under each."""

SSH_OPTIONS = tuple(name[2:].replace("-", "_") for name in SECTIONS["Several nodes by SSH"])
"""Options for starting the nodes over SSH."""

# fmt: off
COMMON_OPTIONS = (
    "--module", "--nproc", "--gpus", "--nnodes", "--node-rank", "--master-addr", "--hosts", "--max-restarts",
    "--log-dir", "--dry-run", "--help", "--help-all",
)
# fmt: on
"""The options in ``--help``."""


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
    """Declare an option with a value; ``spelling`` is its name and a metavar, or its valid values, like "tcp|none"."""
    name, _, metavar = spelling.partition(" ")
    if "|" in metavar:
        how["choices"] = metavar.split("|")
        metavar = ""
    return Option([name], help, read, metavar=metavar or None, **how)


def _flag(spellings: str, help: str, **how: Any) -> Any:
    return Option(spellings.split(), help, is_flag=True, **how)


def _argument(name: str, *, rest: bool = False) -> Any:
    return Option([name], takes_rest=rest, completion="any")


def _seconds(name: str, default: float | None, help: str, read: Any = option_values.seconds) -> Any:
    return _option(f"{name} TIME", help, read, **({} if default is None else {"default": f"{default:g}"}))


_port = number_reader(parse_int, 1, 65535, "a port from 1 to 65535")
_any_port = number_reader(parse_int, 0, 65535, "a port from 1 to 65535, or 0 for any free one")
_count = number_reader(parse_int, 0, UNBOUNDED, "a number from 0 up")
_heartbeat_timeout = number_reader(
    parse_seconds,
    MIN_HEARTBEAT_TIMEOUT_S,
    WEEK_S,
    f"{MIN_HEARTBEAT_TIMEOUT_S:g} seconds or more: with less, a busy node counts as lost",
)


_JOB = JobConfig()  # has the defaults


@dataclass(frozen=True)
class RunOptions:
    """The values of all options and arguments. The default of each field declares its option."""

    module: bool = _flag("-m --module", "Run TARGET as a module, like `python -m`.")
    no_python: bool = _flag("--no-python", "Run TARGET as a program that is not Python.")
    pass_local_rank: bool = _flag(
        "--pass-local-rank",
        "Pass --local-rank=N to the script, or --local_rank=N if it has only that.",
    )
    nproc: str | None = _option(
        "--nproc N",
        "Ranks on each node: a number, a list like 8,8,4, auto, gpu or cpu.  [default: auto: one per GPU, or 1]",
    )
    gpus: str | None = _option(
        "--gpus LIST", "GPUs to use, in this order: indices from `ddplaunch devices`, UUIDs, or none for CPUs only."
    )
    oversubscribe: bool = _flag("--oversubscribe", "Allow several ranks per GPU.")
    virtual_local_rank: bool = _flag(
        "--virtual-local-rank", "Set LOCAL_RANK=0 in every rank and make only its own GPU visible."
    )
    bind: str | None = _option("--bind", "Pin each rank to the CPUs near its GPU.", choices=["numa"])
    cluster: str | None = _option(
        "--cluster NAME",
        "System whose variables describe the nodes: slurm, openmpi, …, or none.  [default: detected]",
    )
    nnodes: tuple[int, int] = _option(
        "--nnodes N",
        "Number of nodes. 2:4 makes the job elastic, with 2 to 4 nodes.",
        option_values.parse_nnodes,
        default="1",
    )
    node_rank: int | str | None = _option(
        "--node-rank I",
        "Rank of this node, from 0; auto: the node at --master-addr is node 0 and numbers the others.",
        option_values.parse_node_rank,
    )
    master_addr: str | None = _option("--master-addr HOST", "Address of node 0.  [default: 127.0.0.1 on one node]")
    master_port: int | None = _option(
        "--master-port PORT",
        "Port of torch's store on node 0.  [default: 29500; on one node any free port]",
        _any_port,
    )
    interface: str | None = _option(
        "--interface NAME", "Network interface for the ranks, like ib0.  [default: the one that routes to node 0]"
    )
    run_id: str | None = _option(
        "--run-id NAME", "Name of the run. Only nodes with the same name can join.", option_values.parse_name
    )
    token: str | None = _option(
        "--token SECRET",
        "Secret that nodes need to join; better in DDPLAUNCH_TOKEN, outside the process list.",
        envvar="DDPLAUNCH_TOKEN",
    )
    hosts: str | None = _option("--hosts A:4,B:4", "Start the job over SSH on these hosts, with this many ranks each.")
    hostfile: str | None = _option(
        "--hostfile FILE", "Read the hosts from FILE, one per line: n1 slots=4", completion="file"
    )
    include: str | None = _option("--include A@B:0,2", "Use only these hosts, or these slots of a host.")
    exclude: str | None = _option("--exclude A@B:0,2", "Skip these hosts, or these slots of a host.")
    env: tuple[str, ...] = _option(
        "--env NAME[=VALUE]",
        "Pass a variable to the hosts, besides NCCL_* and some others; may be repeated.",
        multiple=True,
    )
    remote_python: str | None = _option(
        "--remote-python PATH", "Path of Python on the hosts.  [default: the path of this Python]"
    )
    control: str = _option(
        "--control tcp|none",
        "Protocol between the nodes; with none they do not notice failures of others.",
        default="tcp",
    )
    control_port: int | None = _option(
        "--control-port PORT", "Port on which node 0 listens for the other nodes.  [default: master port + 1]", _port
    )
    join_timeout: float = _seconds("--join-timeout", _JOB.join_timeout, "How long to wait for all nodes.")
    heartbeat_timeout: float = _seconds(
        "--heartbeat-timeout",
        _JOB.heartbeat_timeout,
        "Treat a node as lost after this long without a heartbeat.",
        _heartbeat_timeout,
    )
    allow_mismatch: bool = _flag("--allow-mismatch", "Only warn if versions differ between nodes.")
    spares: int = _option(
        "--spares N",
        "Start N standby nodes, which replace nodes that are lost or fail.",
        _count,
        default="0",
    )
    join_window: float = _seconds(
        "--join-window", _JOB.join_window, "How long to wait for more nodes once enough have joined."
    )
    max_membership_changes: int = _option(
        "--max-membership-changes N",
        "Continue at most N times after nodes were lost or added.",
        _count,
        default=str(_JOB.max_membership_changes),
    )
    grow: bool = _flag("--grow", "Restart immediately when another node joins.")
    backend: str | None = _option(
        "--backend NAME", "Initialize the process group before the target runs: nccl, gloo, auto, …"
    )
    init_method: str | None = _option(
        "--init-method URL", "Rendezvous of torch: env://, tcp://host:port or file:///path.  [default: env://]"
    )
    start: str = _option(
        "--start auto|zygote|exec",
        "Fork ranks from a process that has imported torch (zygote), or start a Python for each (exec).",
        default="auto",
    )
    preload: str | None = _option(
        "--preload A,B",
        "Modules to import before forking: a list, auto (torch and packages known to be safe), torch or none.  "
        "[default: auto]",
    )
    warm: bool | None = _flag(
        "--warm",
        "Keep the process that has imported torch for later runs, for 10 minutes.",
        negative_spelling="--no-warm",
        envvar=WARM_VARIABLE,
    )
    check: bool = _flag(
        "--check",
        "Check disks, memory and GPUs of every node before each attempt. An elastic job excludes nodes that fail.",
    )
    gpu_memory_timeout: float | None = _seconds(
        "--gpu-memory-timeout",
        None,
        "With --check: how long to wait for GPU memory that is still in use.  "
        f"[default: {DEFAULT_GPU_MEMORY_TIMEOUT_S:g}]",
    )
    role: str = _option("--role NAME", "Value of ROLE_NAME in the ranks.", default=DEFAULT_ROLE)
    grace: float = _seconds("--grace", _JOB.grace, "Time between SIGTERM and SIGKILL when ranks are stopped.")
    max_restarts: int = _option(
        "--max-restarts N",
        "Restart all ranks after a failure, at most N times.",
        _count,
        default=str(_JOB.max_restarts),
    )
    restart_on: str = _option(
        "--restart-on any|transient|always",
        "Failures to restart after: any, except the same one twice in a row; transient (a signal, a lost connection, "
        "host memory exhaustion); or always.",
        default=_JOB.restart_on,
    )
    restart_backoff: float = _seconds(
        "--restart-backoff",
        _JOB.restart_backoff,
        "Delay before a restart; doubled after each early failure.",
    )
    min_uptime: float = _seconds(
        "--min-uptime", _JOB.min_uptime, "Give up after three attempts in a row shorter than this."
    )
    checkpoint: str | None = _option(
        "--checkpoint PATTERN",
        "Checkpoint files, like 'ckpt/*'. When an attempt fails, work after the last one counts as lost.",
        completion="any",
    )
    timeout: float | None = _seconds(
        "--timeout", None, "Stop the job after this time: 90 (seconds), 10m, 2h.", option_values.time_limit
    )
    stall_timeout: float | None = _seconds(
        "--stall-timeout",
        None,
        "Stop the job after this long without progress.  [default: only report it, after 24 s at the earliest]",
        option_values.time_limit,
    )
    on_stall: str | None = _option(
        "--on-stall stop|restart|report",
        "Action after --stall-timeout: stop the job, restart all ranks, or only report.  [default: stop]",
    )
    straggler_timeout: float | None = _seconds(
        "--straggler-timeout",
        None,
        "Stop ranks that still run this long after the last other rank has ended.",
        option_values.time_limit,
    )
    preempt_signal: int | None = _option(
        "--preempt-signal SIGNAL",
        "Preemption signal of the scheduler, or none.",
        option_values.parse_signal,
        default="USR2",
    )
    preempt_grace: float = _seconds(
        "--preempt-grace",
        _JOB.preempt_grace,
        "Time to save a checkpoint, between the preemption signal and SIGTERM.",
    )
    preempt_forward: int | None = _option(
        "--preempt-forward SIGNAL", "Send this signal to each rank on preemption.", option_values.parse_signal
    )
    tensorboard: str | None = _option(
        "--tensorboard DIR",
        "Run TensorBoard on DIR while the job runs, and print its URL.",
        completion="folder",
    )
    sidecar: tuple[str, ...] = _option(
        "--sidecar COMMAND",
        "Run a program on node 0 while the job runs; may be repeated.",
        option_values.check_commands,
        multiple=True,
    )
    notify: tuple[str, ...] = _option(
        "--notify COMMAND",
        "Run a program on node 0 at events like start, failure, stall and end, with JSON on stdin; may be repeated.",
        option_values.check_commands,
        multiple=True,
    )
    metrics: str | None = _option(
        "--metrics FILE.prom",
        "Write metrics to this file on each node every 15 s, for Prometheus' textfile collector.",
        option_values.check_prom_path,
        completion="file",
    )
    show: str = _option(
        "--show RANKS",
        "Ranks whose output is shown: all, none, 0,3, or local:0 for each node. 0/err is only stderr of rank 0.",
        default="all",
    )
    prefix: str = _option(
        "--prefix TEMPLATE",
        "Prefix of each output line: text with {rank}, {local_rank}, {node_rank}, {host} or {role}, or none.",
        option_values.parse_prefix,
        default=DEFAULT_PREFIX,
        envvar="DDPLAUNCH_PREFIX",
    )
    merge: bool | None = _flag(
        "--merge",
        "Merge equal lines that several ranks print within 0.2 seconds, as [0-7] LINE.  [default: in a terminal only]",
        negative_spelling="--no-merge",
    )
    stdin: int | None = _option(
        "--stdin RANK", "Connect stdin to this rank, for pdb. A single rank always has it.", option_values.integer
    )
    debug: bool = _flag(
        "--debug",
        "Stop ranks at breakpoints until `ddplaunch debug` attaches, also without a terminal.",
    )
    debug_timeout: float = _seconds(
        "--debug-timeout",
        3600.0,
        "Resume a rank in the debugger after this long without input.",
        option_values.time_limit,
    )
    post_mortem: bool = _flag("--post-mortem", "Enter the debugger at the exception of the first rank that fails.")
    debugpy: str | None = _option(
        "--debugpy RANKS",
        "Ranks to which an editor on this machine can attach with debugpy, like 0,3.",
    )
    oom_report: bool = _flag(
        "--oom-report",
        "When CUDA runs out of memory, show the lines that allocated the largest blocks, and save a snapshot.",
    )
    ui: bool = _flag("--ui", "Show the live state of the ranks below the output, like `ddplaunch top`.")
    log_dir: str | None = _option(
        "--log-dir DIR",
        "Write a log folder to DIR: plan, events, output of each rank, failures.",
        completion="folder",
    )
    log_json: bool = _flag(
        "--log-json", "Write ddplaunch's own messages to stderr as JSON, one object per line.", envvar=LOG_JSON_VARIABLE
    )
    no_history: bool = _flag("--no-history", "Do not record this run for `ddplaunch ps`, `logs` and `report`.")
    no_inspect: bool = _flag("--no-inspect", "Disable inspection: no `ddplaunch stacks`, no stacks in failure reports.")
    no_config: bool = _flag("--no-config", "Do not read defaults from pyproject.toml.")
    dry_run: bool = _flag("--dry-run", "Print the plan and exit.")
    as_json: bool = _flag("--json as_json", "With --dry-run: print the plan as JSON.")
    target: str = _argument("target")
    args: tuple[str, ...] = _argument("args", rest=True)
    sources: Mapping[str, OptionSource] = field(default_factory=dict)  # of each value, by the name of the option

    def is_set(self, name: str) -> bool:
        """Whether the user has set an option, on the command line or by a variable."""
        return self.sources[name] in (OptionSource.TYPED, OptionSource.VARIABLE)

    @property
    def has_side_programs(self) -> bool:
        """Whether node 0 runs sidecars or --notify commands."""
        return bool(self.sidecar or self.notify) or self.tensorboard is not None

    @property
    def inferred_names(self) -> tuple[str, ...]:
        """The options whose values come from the cluster environment."""
        return tuple(name for name, source in self.sources.items() if source is OptionSource.CLUSTER)

    def with_values(self, source: OptionSource, changes: Inferred) -> RunOptions:
        """Return a copy with these values from ``source``."""
        return replace(self, **changes, sources={**self.sources, **dict.fromkeys(changes, source)})

    def with_defaults(self, source: OptionSource, defaults: Inferred) -> RunOptions:
        """Return a copy with those of these values that the user has not set; None is skipped.

        A project's defaults have precedence over the cluster environment, but not over --hosts.
        """
        preceding = (
            OptionSource.TYPED,
            OptionSource.VARIABLE,
            *([OptionSource.FILE] if source is OptionSource.CLUSTER else []),
        )
        unset: Any = {
            n: value for n, value in defaults.items() if value is not None and self.sources[n] not in preceding
        }
        return self.with_values(source, unset)

    def subset_for(self, kind: type[Any]) -> dict[str, Any]:
        """Return the values of the options that are fields of a dataclass, by their common names."""
        return {name: getattr(self, name) for name in RunOptions.__match_args__ if name in kind.__match_args__}

    def to_argv(self, excluded: Collection[str]) -> Iterator[str]:
        """Return the command line of the options that the user or the project has set, except those in ``excluded``."""
        for option in OPTIONS:
            is_chosen = not option.is_argument and (
                self.is_set(option.name) or self.sources[option.name] is OptionSource.FILE
            )
            if is_chosen and option.name not in excluded:
                yield from to_argv(option, getattr(self, option.name))


OPTIONS = tuple(each for each in vars(RunOptions).values() if isinstance(each, Option))
"""The options and arguments, in order."""
