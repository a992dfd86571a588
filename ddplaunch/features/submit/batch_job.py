"""A batch job: the resources it requests and what it runs, read from the options of ``ddplaunch submit``."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence

import click
from msgspec import Struct

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.options import OptionSource, value_source
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.features.submit import batch_command
from ddplaunch.features.submit.batch_command import parsed_line, run_argv
from ddplaunch.features.submit.grid import GridRun, expand_grid
from ddplaunch.features.submit.remote_submission import CURRENT
from ddplaunch.system.code_version import CodeVersion


class SetupCommand(Struct, frozen=True):
    """One ``--setup`` or ``--teardown``: a file that the job's shell sources, or a command that it runs."""

    text: str
    is_file: bool = False

    @property
    def line(self) -> str:
        """The shell command of this entry; it ends with a line break if ``;`` or ``)`` cannot follow it directly."""
        if self.is_file:
            return f"source {shlex.quote(self.text)}"
        text = self.text.strip()
        bare = text.rstrip("; ")
        # A comment, several lines (a here-document), a command in the background, an escaped semicolon.
        ends_line = "#" in text or "\n" in text or text.endswith("&") or (bare != text and bare.endswith("\\"))
        return f"{text}\n" if ends_line else bare

    @property
    def line_or_exit(self) -> str:
        """The shell command of this entry, after which the shell exits if the command failed."""
        return f"{{ {self.line}}} || exit" if self.line.endswith("\n") else f"{self.line} || exit"

    def __str__(self) -> str:
        return self.text


class RequeueOptions(Struct, frozen=True):
    """``--requeue``: how often, and when the preemption signal comes."""

    max_times: int
    warning: str  # the signal's name, without SIG
    grace: float  # seconds for a checkpoint
    stop_s: float  # seconds to stop the ranks
    codes: tuple[int, ...] = ()  # exit codes after which the job is requeued too, without the node that failed

    @property
    def warning_lead_s(self) -> int:
        """Seconds between the preemption signal and the end of the job."""
        return math.ceil(self.grace + self.stop_s)

    @property
    def timing_comment(self) -> str:
        """Text of a comment in the script: how the time after the preemption signal is used."""
        return f"{self.grace:g} s for a checkpoint, then {self.stop_s:g} s for ranks to stop"

    def __str__(self) -> str:
        codes = f", also after exit code {', '.join(map(str, self.codes))}" if self.codes else ""
        return f"{self.max_times}{codes}, warned by {self.warning} {self.warning_lead_s} s before the end"


class JobCode(Struct, frozen=True):
    """The copy of the code that a job runs."""

    copy: str  # the folder of the copy
    run_folder: str  # the folder in the copy where the launchers start
    version: CodeVersion

    def __str__(self) -> str:
        return self.copy


class BatchJob(Struct, frozen=True):
    """One job. None leaves a value to the scheduler's or the site's default."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    interpreter: str  # the Python that runs ddplaunch on the nodes
    chdir: str  # the absolute folder that the job runs in, on all nodes
    job_name: str
    output: str | None = None  # the log, with the scheduler's patterns, relative to `chdir`; None: the default name
    error: str | None = None  # the file of stderr, likewise; None is the log
    nodes: int = 1  # with the spares
    spares: int = 0  # standby nodes among `nodes`, which replace lost ones
    gpus_per_node: str | None = None  # a number, or a type and a number ("a100:8")
    gpus_per_task: str | None = None  # the same, as a node has one task
    gres: str | None = None  # like gpu:a100:8,nvme:1
    cpus_per_task: int | None = None  # on each node
    mem: str | None = None  # on each node, like 200G; the three memory options exclude each other
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    time: str | None = None  # the limit, in one of sbatch's forms
    partition: str | None = None  # or the queue
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False  # whole nodes
    reservation: str | None = None
    dependency: str | None = None  # like afterok:4711 or singleton
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    array: str | None = None  # indices like 0-3 or 1,5%2; every one is a job of `nodes` nodes
    pe: str | None = None  # the parallel environment of Grid Engine: on each host the same number of slots
    grid: Sequence[GridRun] = ()  # the runs of an array that differ in their arguments, by index from 0
    extra_options: Sequence[str] = ()  # other options of the program that submits, in its syntax
    srun_args: Sequence[str] = ()  # other options of srun, in its syntax
    setup: Sequence[SetupCommand] = ()
    teardown: Sequence[SetupCommand] = ()  # runs at the end, whatever the exit code
    container_image: str | None = None  # srun's option of the pyxis plugin (github.com/NVIDIA/pyxis)
    container_mounts: Sequence[str] = ()  # SRC:DST pairs besides `chdir`, which is always mounted
    code: JobCode | None = None  # None runs the files of `chdir` as they are when the job starts
    requeue: RequeueOptions | None = None  # None leaves preempted jobs to the scheduler's own rules

    def grid_lines(self, index: str) -> Iterator[str]:
        """Yield commands that set ``grid`` to the arguments of a run of --grid; ``index``: its index, for a shell."""
        if self.grid:
            yield f"# The arguments of each run: {self.grid[0].name} is the first."
            yield f'case "{index}" in'
            for number, run in enumerate(self.grid):
                yield f"{number}) grid=({shlex.join(run.arguments)}) ;;"
            yield "esac"
            yield ""

    @property
    def command_line(self) -> str:
        """The words of ``command`` for a shell, followed by the arguments of a run of --grid, if any."""
        if not self.grid:
            return shlex.join(self.command)
        ends = [] if "--" in self.command else ["--"]
        return f'{shlex.join([*self.command, *ends])} "${{grid[@]}}"'

    @property
    def seconds(self) -> int | None:
        """The time limit; None for none."""
        return batch_command.parse_time_s(self.time) if self.time else None


def read_batch_job(ctx: click.Context, job_name: str, more: Sequence[str]) -> BatchJob:
    """Read the options into a job. Raises UsageError if a --setup file is missing or --requeue cannot work."""
    values = ctx.params
    if values["requeue_on"] and not values["requeue"]:
        codes = ",".join(map(str, values["requeue_on"]))
        raise UsageError(f"--requeue-on {codes} does nothing without --requeue N", f"--requeue 3 --requeue-on {codes}")
    from_options = {name: values[name] for name in BatchJob.__annotations__ if name in values}
    grid = _read_grid(ctx)
    derived = {
        "command": run_argv(ctx),
        "grid": grid,
        "array": f"0-{len(grid) - 1}" if grid else values["array"],
        "interpreter": "python" if values["container_image"] else sys.executable,
        "chdir": CURRENT[0].folder if CURRENT else require_current_folder(),
        "job_name": job_name,
        "nodes": values["nodes"] + values["spares"],
        "extra_options": more,
        "setup": tuple(_read_setups(ctx, "setup")),
        "teardown": tuple(_read_setups(ctx, "teardown")),
        "code": None,
        "requeue": _read_requeue(ctx) if values["requeue"] else None,
    }
    return BatchJob(**{**from_options, **derived})


def _read_grid(ctx: click.Context) -> tuple[GridRun, ...]:
    """Return the runs of --grid. Raises UsageError if there are too many, or if --array is given too."""
    axes = ctx.params["grid"]
    if axes and ctx.params["array"]:
        raise UsageError(f"--grid does not work with --array {ctx.params['array']}", "leave one of them out")
    if ctx.params["yes"] and not axes:
        raise UsageError("--yes does nothing without --grid", "leave it out")
    return expand_grid(axes, parsed_line(ctx).line.program_args, is_confirmed=ctx.params["yes"]) if axes else ()


def _read_requeue(ctx: click.Context) -> RequeueOptions:
    """Read --requeue and the options that it depends on."""
    max_times: int = ctx.params["requeue"]
    warning: int | None = ctx.params["preempt_signal"]
    name = "none" if warning is None else signal.Signals(warning).name.removeprefix("SIG")
    if warning is None or warning in (signal.SIGTERM, signal.SIGHUP):
        hint = "leave --preempt-signal out: scancel sends SIGTERM too, and a cancelled job must not come back"
        raise UsageError(f"--requeue {max_times} does not work with --preempt-signal {name}", hint)
    requeue = RequeueOptions(
        max_times, name, ctx.params["preempt_grace"], ctx.params["grace"], ctx.params["requeue_on"] or ()
    )
    time: str = ctx.params["time"] or "UNLIMITED"
    limit = batch_command.parse_time_s(time)
    if limit is not None and limit <= requeue.warning_lead_s:
        raise UsageError(
            f"--time {time} is {limit} s, but the signal comes {requeue.warning_lead_s} s before the end"
            f" (--preempt-grace {requeue.grace:g} and --grace {requeue.stop_s:g})",
            "use a longer --time, or a shorter --preempt-grace",
        )
    return requeue


def _read_setups(ctx: click.Context, name: str) -> Iterator[SetupCommand]:
    """Yield the files and the commands. A relative path in a file of defaults starts at the folder of that file."""
    folder = require_current_folder()
    if value_source(ctx, name) is OptionSource.FILE:
        folder = os.path.dirname(parsed_line(ctx).defaults.values[name].file)
    for text in ctx.params[name]:
        path, command = os.path.join(folder, os.path.expanduser(text)), text.strip()
        if os.path.isfile(path):
            yield SetupCommand(path, is_file=True)
        elif len(text.split()) == 1 and (text.endswith(".sh") or "/" in text):
            raise UsageError(f"--{name} {text}: no such file in {folder}", "a command has more than one word")
        elif (len(command) - len(command.rstrip("\\"))) % 2:
            what = f"--{name} {sanitize_line(command, 60)}: the backslash at its end joins the next line of the script"
            raise UsageError(what, "leave it out, or type two for a backslash in the command")
        elif command:
            yield SetupCommand(text)
