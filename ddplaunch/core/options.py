"""The options of ``ddplaunch run`` for the core, in groups: spelling, help, default, parser and contradictions."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

import signal
from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.base.types import MIN_HEARTBEAT_TIMEOUT_S, WEEK_S
from ddplaunch.core.option_values import (
    AUTO,
    UNBOUNDED,
    format_nnodes,
    format_signal,
    integer,
    make_number_parser,
    parse_name,
    parse_nnodes,
    parse_node_rank,
    parse_prefix,
    parse_restart_on,
    parse_run_name,
    parse_seconds,
    parse_signal,
    seconds,
    time_limit,
)
from ddplaunch.core.prefix import DEFAULT_PREFIX, uses_rank_only
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.plan import DEFAULT_ROLE

LOG_JSON_VARIABLE = "DDPLAUNCH_LOG_JSON"
"""The variable for ``--log-json``."""

_port = make_number_parser(parse_int, 1, 65535, "a port from 1 to 65535")
_any_port = make_number_parser(parse_int, 0, 65535, "a port from 1 to 65535, or 0 for any free one")
_count = make_number_parser(parse_int, 0, UNBOUNDED, "a number from 0 up")
_segment = make_number_parser(parse_int, 1, UNBOUNDED, "a number from 1 up")
_niceness = make_number_parser(parse_int, 0, 19, "a number from 0 to 19")
_heartbeat_timeout = make_number_parser(
    parse_seconds,
    MIN_HEARTBEAT_TIMEOUT_S,
    WEEK_S,
    f"{MIN_HEARTBEAT_TIMEOUT_S:g} seconds or more: with less, a busy node counts as lost",
)


# With two or three lines for an option, a group can be seen at once.
# fmt: off


class TargetOptions(OptionGroup, frozen=True):
    """What runs: the target and its arguments."""

    heading = "Target"

    target: Annotated[str, Option("target")] = ""
    args: Annotated[tuple[str, ...], Option("args")] = ()
    module: Annotated[bool, Option("-m --module", "Run TARGET as a module, like `python -m`.", is_common=True)] = False
    no_python: Annotated[bool, Option("--no-python", "Run TARGET as a program that is not Python.")] = False
    pass_local_rank: Annotated[bool, Option("--pass-local-rank",
        "Pass --local-rank=N to the script, or --local_rank=N if it has only that.", in_project=True)] = False


class RanksPerNode(OptionGroup, frozen=True):
    """How many ranks this node has, and their devices."""

    heading = "Ranks and devices"

    nproc: Annotated[str | None, Option("--nproc N",
        "Ranks on each node: a number, a list like 8,8,4, auto, gpu or cpu.  [default: auto: one per GPU, or 1]",
        is_common=True, in_project=True)] = None
    gpus: Annotated[str | None, Option("--gpus LIST",
        "GPUs to use, in this order: indices from `ddplaunch devices`, UUIDs; mig: all MIG instances; free:2 reserves "
        "two that are free; none for CPUs only.",
        is_common=True, in_project=True)] = None
    oversubscribe: Annotated[bool, Option("--oversubscribe", "Allow several ranks per GPU.", in_project=True)] = False
    virtual_local_rank: Annotated[bool, Option("--virtual-local-rank",
        "Set LOCAL_RANK=0 in every rank and make only its own GPU visible.", in_project=True)] = False
    bind: Annotated[str | None, Option("--bind numa",
        "Pin each rank to the CPUs near its GPU.", in_project=True)] = None


def wants_free_gpus(gpus: str | None) -> bool:
    """Whether a value of ``--gpus`` requests free GPUs, as free:2 does."""
    word = (gpus or "").strip().lower()
    return word.startswith("free") and not word[4:5].isalpha()


class Nodes(OptionGroup, frozen=True):
    """The nodes of the job and how they find each other."""

    heading = "Several nodes"

    # DDPLAUNCH_NNODES and DDPLAUNCH_NODE_RANK are those of a scheduler: system/clusters reads them.
    nnodes: Annotated[tuple[int, int], Option("--nnodes N",
        "Number of nodes. 2:4 makes the job elastic, with 2 to 4 nodes.", parse_nnodes, format_nnodes,
        is_common=True, has_variable=False)] = (1, 1)
    node_rank: Annotated[int | str | None, Option("--node-rank I",
        "Rank of this node, from 0; auto: the node at --master-addr is node 0 and numbers the others.",
        parse_node_rank, is_common=True, has_variable=False)] = None
    master_addr: Annotated[str | None, Option("--master-addr HOST",
        "Address of node 0.  [default: 127.0.0.1 on one node]", is_common=True)] = None
    master_port: Annotated[int | None, Option("--master-port PORT",
        "Port of torch's store on node 0.  [default: 29500; on one node any free port]", _any_port)] = None
    domain: Annotated[str | None, Option("--domain NAME",
        "What this node shares with those near it, like a rack: they get contiguous ranks where node 0 gives them.  "
        "[default: the NVLink domain, else the switch that Slurm names]", parse_name, is_local=True)] = None
    node_order: Annotated[str, Option("--node-order given|topology",
        "Order of the nodes where they are numbered, as by Slurm, --hosts or --node-rank: as they are, or topology: by "
        "domain, node 0 first.", in_project=True)] = "given"
    segment: Annotated[int | None, Option("--segment N",
        "Give each N consecutive nodes to one domain, never to several.", _segment)] = None
    interface: Annotated[str | None, Option("--interface NAME",
        "Network interface for the ranks, like ib0.  [default: the one that routes to node 0]")] = None
    cluster: Annotated[str | None, Option("--cluster NAME",
        "System whose variables describe the nodes: slurm, openmpi, …, or none.  [default: detected]")] = None
    run_id: Annotated[str | None, Option("--run-id NAME",
        "Name of the run. Only nodes with the same name can join.", parse_name)] = None
    name: Annotated[str | None, Option("--name NAME",
        "Name of the run in ps, logs and report; a number is added if it was used before.  "
        "[default: the target and a number: train-17]", parse_run_name, is_common=True, is_local=True)] = None
    token: Annotated[str | None, Option("--token SECRET",
        "Secret that nodes need to join; better in DDPLAUNCH_TOKEN, outside the process list.",
        envvar="DDPLAUNCH_TOKEN", is_local=True)] = None

    def check_contradictions(self, options: Options) -> None:
        if self.name and self.run_id:
            named = f"--run-id {self.run_id}" if options.is_set("run_id") else f"{self.run_id}, the name of this run"
            raise UsageError(f"--name {self.name} does not work with {named}", "leave --name out")


class Connections(OptionGroup, frozen=True):
    """The connections between the launchers of the nodes."""

    heading = "Connections between nodes"

    control: Annotated[str, Option("--control tcp|none",
        "Protocol between the nodes; none: nodes cannot detect each other's failures.")] = "tcp"
    control_port: Annotated[int | None, Option("--control-port PORT",
        "Port on which node 0 listens for the other nodes.  [default: master port + 1]", _port)] = None
    join_timeout: Annotated[float, Option("--join-timeout TIME",
        "How long to wait for all nodes.", seconds, in_project=True)] = 600.0
    heartbeat_timeout: Annotated[float, Option("--heartbeat-timeout TIME",
        "Treat a node as lost after this long without a heartbeat.", _heartbeat_timeout, in_project=True)] = 15.0
    allow_mismatch: Annotated[bool, Option("--allow-mismatch", "Only warn if versions differ between nodes.")] = False

    def check_contradictions(self, options: Options) -> None:
        if self.control == "none" and options[Nodes].node_rank == AUTO:
            raise UsageError("--node-rank auto does not work with --control none", "leave --control none out")


class Elastic(OptionGroup, frozen=True):
    """How a job continues with another number of nodes."""

    heading = "Elastic jobs (--nnodes 2:4) and spares"

    spares: Annotated[int, Option("--spares N",
        "Start N standby nodes, which replace nodes that are lost or fail.", _count)] = 0
    join_window: Annotated[float, Option("--join-window TIME",
        "How long to wait for more nodes once enough have joined.", seconds)] = 30.0
    max_membership_changes: Annotated[int, Option("--max-membership-changes N",
        "Continue at most N times after nodes were lost or added.", _count)] = 100
    grow: Annotated[bool, Option("--grow", "Restart immediately when another node joins.")] = False

    def check_contradictions(self, options: Options) -> None:
        lowest, highest = options[Nodes].nnodes
        no_control, nproc = options[Connections].control == "none", options[RanksPerNode].nproc
        if self.grow and lowest == highest:
            raise UsageError(f"--grow does not work with --nnodes {highest}", f"--nnodes {highest}:{highest + 1}")
        if no_control and lowest != highest:
            what = f"--nnodes {lowest}:{highest} does not work with --control none"
            raise UsageError(what, "leave --control none out")
        if self.spares and no_control:
            what = f"--spares {self.spares} does not work with --control none: nodes do not notice lost nodes"
            raise UsageError(what, "leave one of them out")
        if self.spares and highest == 1:
            what = f"--spares {self.spares} works only with several nodes: a spare cannot replace node 0"
            raise UsageError(what, "--nnodes 2 or more; --max-restarts restarts the ranks of a single node")
        if self.spares and nproc and "," in nproc:
            what = f"--nproc {nproc} does not work with --spares: a spare must have as many ranks as every other node"
            raise UsageError(what, "give one number for all nodes")


class Starting(OptionGroup, frozen=True):
    """How ranks are started."""

    heading = "Starting ranks"

    backend: Annotated[str | None, Option("--backend NAME",
        "Initialize the process group before the target runs: nccl, gloo, auto, …", in_project=True)] = None
    init_method: Annotated[str | None, Option("--init-method URL",
        "Rendezvous of torch: env://, tcp://host:port or file:///path.  [default: env://]")] = None
    start: Annotated[str, Option("--start auto|zygote|exec",
        "Fork ranks from a process that has imported torch (zygote), or start a Python for each (exec).",
        in_project=True)] = "auto"
    nice: Annotated[int, Option("--nice N",
        "Added to the niceness of each rank, from 0 to 19: other users' processes come first.", _niceness,
        in_project=True)] = 0

    def check_target(self, options: Options) -> None:
        if self.start == "zygote" and options[TargetOptions].no_python:
            what = "--start zygote does not work with --no-python: only Python can be forked"
            raise UsageError(what, "leave --start zygote out")


class Role(OptionGroup, frozen=True):
    """The role of the ranks, in their variables."""

    heading = "Starting ranks"

    role: Annotated[str, Option("--role NAME", "Value of ROLE_NAME in the ranks.", in_project=True)] = DEFAULT_ROLE


class Stopping(OptionGroup, frozen=True):
    """How ranks are stopped and restarted."""

    heading = "Stopping and restarting"

    grace: Annotated[float, Option("--grace TIME",
        "Time between SIGTERM and SIGKILL when ranks are stopped.", seconds, in_project=True)] = 30.0
    max_restarts: Annotated[int, Option("--max-restarts N",
        "Restart all ranks after a failure, at most N times.", _count, is_common=True, in_project=True)] = 0
    restart_on: Annotated[str, Option("--restart-on CAUSES",
        "Failures to restart after: any, except the same one twice in a row; always; or a list of exit codes and "
        "transient (a signal, a lost connection, host memory exhaustion), like 75,transient.", parse_restart_on,
        in_project=True)] = "any"
    restart_backoff: Annotated[float, Option("--restart-backoff TIME",
        "Delay before a restart; doubled after each early failure.", seconds, in_project=True)] = 0.0
    min_uptime: Annotated[float, Option("--min-uptime TIME",
        "Stop restarting after three consecutive attempts shorter than this.", seconds, in_project=True)] = 5.0


class TimeLimit(OptionGroup, frozen=True):
    """How long the job may run."""

    heading = "Time limits"

    timeout: Annotated[float | None, Option("--timeout TIME",
        "Stop the job after this time: 90 (seconds), 10m, 2h.", time_limit, in_project=True)] = None


class Preemption(OptionGroup, frozen=True):
    """What happens when the scheduler preempts the job."""

    heading = "Preemption"

    preempt_signal: Annotated[int | None, Option("--preempt-signal SIGNAL",
        "Preemption signal of the scheduler, or none.", parse_signal, format_signal,
        in_project=True)] = signal.SIGUSR2.value
    preempt_grace: Annotated[float, Option("--preempt-grace TIME",
        "Time to save a checkpoint, between the preemption signal and SIGTERM.", seconds, in_project=True)] = 90.0
    preempt_forward: Annotated[int | None, Option("--preempt-forward SIGNAL",
        "Send this signal to each rank on preemption.", parse_signal, format_signal, in_project=True)] = None


class Output(OptionGroup, frozen=True):
    """Where the output of ranks goes."""

    heading = "Output"

    show: Annotated[str, Option("--show RANKS",
        "Ranks whose output is shown: all, none, last, 0,3, or local:0 for each node. 0/err is only stderr of rank 0.",
        in_project=True)] = "all"
    prefix: Annotated[str, Option("--prefix TEMPLATE",
        "Prefix of each output line: text with {rank}, {local_rank}, {node_rank}, {host} or {role}, or none.",
        parse_prefix, envvar="DDPLAUNCH_PREFIX", in_project=True)] = DEFAULT_PREFIX
    merge: Annotated[bool | None, Option("--merge",
        "Merge equal lines that several ranks print within 0.2 seconds, as [0-7] LINE.  "
        "[default: in a terminal only]", off="--no-merge", in_project=True)] = None
    stdin: Annotated[int | None, Option("--stdin RANK",
        "Connect stdin to this rank, for pdb. A single rank always has it.", integer, is_local=True)] = None

    def check_contradictions(self, options: Options) -> None:
        if self.merge and not uses_rank_only(self.prefix):
            what = f"--merge does not work with --prefix {self.prefix}: only {{rank}} can name several ranks"
            raise UsageError(what, "--prefix '[{rank}]'")


class Logging(OptionGroup, frozen=True):
    """Where the log folder is, and the form of ddplaunch's own messages."""

    heading = "Output"

    log_dir: Annotated[str | None, Option("--log-dir DIR",
        "Write a log folder to DIR: plan, events, output of each rank, failures.", completion="folder",
        is_common=True, in_project=True)] = None
    log_json: Annotated[bool, Option("--log-json",
        "Write ddplaunch's own messages to stderr as JSON, one object per line.", envvar=LOG_JSON_VARIABLE)] = False


class Inspecting(OptionGroup, frozen=True):
    """Whether ranks can be inspected."""

    heading = "Output"

    no_inspect: Annotated[bool, Option("--no-inspect",
        "Disable inspection: no `ddplaunch stacks`, no stacks in failure reports.", in_project=True)] = False


class DryRun(OptionGroup, frozen=True):
    """Whether the plan is only printed, and what is read for it."""

    heading = "Dry run and help"

    no_config: Annotated[bool, Option("--no-config", "Do not read defaults from pyproject.toml.")] = False
    dry_run: Annotated[bool, Option("--dry-run", "Print the plan and exit.", is_common=True, is_local=True)] = False
    as_json: Annotated[bool, Option("--json", "With --dry-run: print the plan as JSON.", is_local=True)] = False

    def check_contradictions(self, options: Options) -> None:
        if self.as_json and not self.dry_run:
            raise UsageError("--json works only with --dry-run", "add --dry-run")
