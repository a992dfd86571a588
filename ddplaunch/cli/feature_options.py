"""The options of ``ddplaunch run`` for features, in groups: spelling, help, default, parser and contradictions."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.core_options import Connections, Nodes, Output, Starting, Stopping, TargetOptions
from ddplaunch.cli.option_values import check_commands, check_prom_path, seconds, time_limit
from ddplaunch.core.job_config import DEFAULT_GPU_MEMORY_TIMEOUT_S
from ddplaunch.core.options import Option, OptionGroup, Options

WARM_VARIABLE = "DDPLAUNCH_WARM"
"""The variable for ``--warm``, or with 0 for ``--no-warm``."""


# With two or three lines for an option, a group can be seen at once.
# fmt: off


class SshHosts(OptionGroup, frozen=True):
    """The hosts on which the job is started over SSH."""

    hosts: Annotated[str | None, Option("--hosts A:4,B:4",
        "Start the job over SSH on these hosts, with this many ranks each.")] = None
    hostfile: Annotated[str | None, Option("--hostfile FILE",
        "Read the hosts from FILE, one per line: n1 slots=4", completion="file")] = None
    include: Annotated[str | None, Option("--include A@B:0,2",
        "Use only these hosts, or these slots of a host.")] = None
    exclude: Annotated[str | None, Option("--exclude A@B:0,2", "Skip these hosts, or these slots of a host.")] = None
    env: Annotated[tuple[str, ...], Option("--env NAME[=VALUE]",
        "Pass a variable to the hosts, besides NCCL_* and some others; may be repeated.")] = ()
    remote_python: Annotated[str | None, Option("--remote-python PATH",
        "Path of Python on the hosts.  [default: the path of this Python]")] = None

    @property
    def is_used(self) -> bool:
        return self.hosts is not None or self.hostfile is not None

    def check_contradictions(self, options: Options) -> None:
        for name in () if self.is_used else SSH_OPTIONS:
            if options.is_set(name):
                what = f"--{name.replace('_', '-')} works only with --hosts or --hostfile"
                raise UsageError(what, "--hosts n1:4,n2:4")


class Preloading(OptionGroup, frozen=True):
    """What is imported before ranks are forked."""

    preload: Annotated[str | None, Option("--preload A,B",
        "Modules to import before forking: a list, auto (torch and packages known to be safe), torch or none.  "
        "[default: auto]")] = None

    def check_contradictions(self, options: Options) -> None:
        for name in self.preload.split(",") if self.preload else ():
            if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
                what = f"--preload {self.preload}: {name!r} is not the name of a module"
                raise UsageError(what, "--preload torch,numpy")
        if options[Starting].start == "exec" and self.preload:
            raise UsageError("--preload does not work with --start exec", "leave one of them out")


class Warming(OptionGroup, frozen=True):
    """Whether the process that has imported torch is kept."""

    warm: Annotated[bool | None, Option("--warm",
        "Keep the process that has imported torch for later runs, for 10 minutes.",
        off="--no-warm", envvar=WARM_VARIABLE)] = None


class Checking(OptionGroup, frozen=True):
    """The check of every node before an attempt."""

    check: Annotated[bool, Option("--check",
        "Check disks, memory and GPUs of every node before each attempt. An elastic job excludes nodes that fail."
    )] = False
    gpu_memory_timeout: Annotated[float | None, Option("--gpu-memory-timeout TIME",
        "With --check: how long to wait for GPU memory that is still in use.  "
        f"[default: {DEFAULT_GPU_MEMORY_TIMEOUT_S:g}]", seconds)] = None

    def check_contradictions(self, options: Options) -> None:
        if self.gpu_memory_timeout is not None and not self.check:
            raise UsageError(f"--gpu-memory-timeout {self.gpu_memory_timeout:g} works only with --check", "add --check")


class Recording(OptionGroup, frozen=True):
    """What is recorded about a run."""

    checkpoint: Annotated[str | None, Option("--checkpoint PATTERN",
        "Checkpoint files, like 'ckpt/*'. When an attempt fails, work after the last one counts as lost.",
        completion="any")] = None
    no_history: Annotated[bool, Option("--no-history",
        "Do not record this run for `ddplaunch ps`, `logs` and `report`.")] = False


class Inspecting(OptionGroup, frozen=True):
    """The inspection of ranks, and what follows from it."""

    no_inspect: Annotated[bool, Option("--no-inspect",
        "Disable inspection: no `ddplaunch stacks`, no stacks in failure reports.")] = False
    stall_timeout: Annotated[float | None, Option("--stall-timeout TIME",
        "Stop the job after this long without progress.  [default: only report it, after 24 s at the earliest]",
        time_limit)] = None
    on_stall: Annotated[str | None, Option("--on-stall stop|restart|report",
        "Action after --stall-timeout: stop the job, restart all ranks, or only report.  [default: stop]")] = None
    straggler_timeout: Annotated[float | None, Option("--straggler-timeout TIME",
        "Stop ranks that still run this long after the last other rank has ended.", time_limit)] = None

    def check_contradictions(self, options: Options) -> None:
        if self.on_stall and self.stall_timeout is None:
            raise UsageError(f"--on-stall {self.on_stall} works only with --stall-timeout", "add --stall-timeout 10m")
        if self.on_stall == "restart" and not options[Stopping].max_restarts:
            raise UsageError("--on-stall restart works only with --max-restarts", "add --max-restarts 3")
        if self.stall_timeout is None:
            return
        no_control = options[Connections].control == "none" and options[Nodes].nnodes[1] > 1
        for given, name, why in (
            (self.no_inspect, "--no-inspect", "it inspects the progress of the ranks"),
            (options[TargetOptions].no_python, "--no-python", "only Python programs can be inspected"),
            (no_control, "--control none", "each node sees only its own ranks"),
        ):
            if given:
                raise UsageError(f"--stall-timeout does not work with {name}: {why}", "leave one of them out")


class Sidecars(OptionGroup, frozen=True):
    """Programs that run beside the ranks."""

    tensorboard: Annotated[str | None, Option("--tensorboard DIR",
        "Run TensorBoard on DIR while the job runs, and print its URL.", completion="folder")] = None
    sidecar: Annotated[tuple[str, ...], Option("--sidecar COMMAND",
        "Run a program on node 0 while the job runs; may be repeated.", check_commands)] = ()


class Notifications(OptionGroup, frozen=True):
    """Programs that run at events."""

    notify: Annotated[tuple[str, ...], Option("--notify COMMAND",
        "Run a program on node 0 at events like start, failure, stall and end, with JSON on stdin; "
        "may be repeated.", check_commands)] = ()


class Metrics(OptionGroup, frozen=True):
    """Metrics for monitoring."""

    metrics: Annotated[str | None, Option("--metrics FILE.prom",
        "Write metrics to this file on each node every 15 s, for Prometheus' textfile collector.",
        check_prom_path, completion="file")] = None


class Debugging(OptionGroup, frozen=True):
    """Breakpoints and debuggers."""

    debug: Annotated[bool, Option("--debug",
        "Stop ranks at breakpoints until `ddplaunch debug` attaches, also without a terminal.")] = False
    debug_timeout: Annotated[float, Option("--debug-timeout TIME",
        "Resume a rank in the debugger after this long without input.", time_limit)] = 3600.0
    post_mortem: Annotated[bool, Option("--post-mortem",
        "Enter the debugger at the exception of the first rank that fails.")] = False
    debugpy: Annotated[str | None, Option("--debugpy RANKS",
        "Ranks to which an editor on this machine can attach with debugpy, like 0,3.")] = None


class MemoryReport(OptionGroup, frozen=True):
    """The report when GPU memory is exhausted."""

    oom_report: Annotated[bool, Option("--oom-report",
        "When CUDA runs out of memory, show the lines that allocated the largest blocks, and save a snapshot.")] = False


class LiveDisplay(OptionGroup, frozen=True):
    """The live state below the output."""

    ui: Annotated[bool, Option("--ui",
        "Show the live state of the ranks below the output, like `ddplaunch top`.")] = False

    def check_contradictions(self, options: Options) -> None:
        if self.ui and (rank := options[Output].stdin) is not None:
            what = f"--ui does not work with --stdin {rank}: both read the keyboard"
            raise UsageError(what, "leave --ui out, and run ddplaunch top in another terminal")


SSH_OPTIONS = SshHosts.__struct_fields__
"""Options for starting the nodes over SSH."""
