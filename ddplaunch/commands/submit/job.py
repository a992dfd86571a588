"""What a job asks its scheduler for, and what it runs: read from the options of ``ddplaunch submit``, and checked."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence

import click

from ddplaunch.cli import batch_command
from ddplaunch.cli.batch_command import given as typed_on
from ddplaunch.cli.batch_command import words_of_run
from ddplaunch.cli.options import Source
from ddplaunch.cli.run_command import source_of
from ddplaunch.cli.typed import current_directory
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError


@dataclass(frozen=True)
class Setup:
    """One ``--setup`` or ``--teardown``: a file that the job's shell sources, or a command that it runs."""

    text: str
    is_file: bool = False

    @property
    def line(self) -> str:
        """What the shell runs for it."""
        return f"source {shlex.quote(self.text)}" if self.is_file else self.text.rstrip("; ")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Requeue:
    """``--requeue``: how often, and a warning early enough for a checkpoint."""

    max_times: int
    warning: str  # the signal's name, without SIG
    grace: float  # seconds for a checkpoint
    stopping: float  # seconds to stop the ranks

    @property
    def before_the_end(self) -> int:
        """Seconds between the warning and the end."""
        return math.ceil(self.grace + self.stopping)

    @property
    def times(self) -> str:
        """What there is time for after the warning."""
        return f"{self.grace:g} s for a checkpoint, then {self.stopping:g} s for ranks to stop"

    def __str__(self) -> str:
        return f"{self.max_times}, warned by {self.warning} {self.before_the_end} s before the end"


@dataclass(frozen=True)
class BatchJob:
    """One job. None leaves a value to the scheduler's or the site's default."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    interpreter: str  # the Python that runs ddplaunch on the nodes
    chdir: str  # the absolute folder that the job runs in, on all nodes
    job_name: str
    output: str | None = None  # the log, with the scheduler's patterns, relative to `chdir`
    error: str | None = None  # the file of stderr, likewise; None is the log
    nodes: int = 1  # with the spares
    spares: int = 0  # of the nodes; the job goes on without one that is lost
    gpus_per_node: str | None = None  # a number, or a type and a number ("a100:8")
    gpus_per_task: str | None = None  # the same, as a node has one task
    gres: str | None = None  # like gpu:a100:8,nvme:1
    cpus_per_task: int | None = None  # on each node
    mem: str | None = None  # on each node, like 200G; the three of memory exclude each other
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
    more: Sequence[str] = ()  # further options of the program that submits, as typed there
    srun_args: Sequence[str] = ()  # further options of srun, as typed there
    setup: Sequence[Setup] = ()
    teardown: Sequence[Setup] = ()  # runs at the end, whatever the exit code
    container_image: str | None = None  # srun's option of the pyxis plugin (github.com/NVIDIA/pyxis)
    container_mounts: Sequence[str] = ()  # SRC:DST pairs beside `chdir`, which is always mounted
    requeue: Requeue | None = None  # None leaves preempted jobs to the scheduler's own rules

    @property
    def seconds(self) -> int | None:
        """The limit; None for none."""
        return batch_command.seconds(self.time) if self.time else None


def read(ctx: click.Context, job_name: str, more: Sequence[str]) -> BatchJob:
    """Read the options into a job; refuse a file of --setup that is missing, and a --requeue that cannot work."""
    values = ctx.params
    as_typed = {name: values[name] for name in BatchJob.__annotations__ if name in values}
    ours = {
        "command": words_of_run(ctx),
        "interpreter": "python" if values["container_image"] else sys.executable,
        "chdir": current_directory(),
        "job_name": job_name,
        "nodes": values["nodes"] + values["spares"],
        "more": more,
        "setup": tuple(_setups(ctx, "setup")),
        "teardown": tuple(_setups(ctx, "teardown")),
        "requeue": _requeue(ctx) if values["requeue"] else None,
    }
    return BatchJob(**{**as_typed, **ours})


def _requeue(ctx: click.Context) -> Requeue:
    """What --requeue means in seconds and signals."""
    max_times: int = ctx.params["requeue"]
    warning: int | None = ctx.params["preempt_signal"]
    name = "none" if warning is None else signal.Signals(warning).name.removeprefix("SIG")
    if warning is None or warning in (signal.SIGTERM, signal.SIGHUP):
        hint = "leave --preempt-signal out: scancel sends SIGTERM too, and a cancelled job must not come back"
        raise UsageError(f"--requeue {max_times} does not work with --preempt-signal {name}", hint)
    requeue = Requeue(max_times, name, ctx.params["preempt_grace"], ctx.params["grace"])
    time: str = ctx.params["time"] or "UNLIMITED"
    limit = batch_command.seconds(time)
    if limit is not None and limit <= requeue.before_the_end:
        raise UsageError(
            f"--time {time} is {limit} s, and the warning comes {requeue.before_the_end} s before its end"
            f" (--preempt-grace {requeue.grace:g} and --grace {requeue.stopping:g})",
            "give it more time, or a shorter --preempt-grace",
        )
    return requeue


def _setups(ctx: click.Context, name: str) -> Iterator[Setup]:
    """Tell files from commands. A file that a file of defaults names is looked for beside that one."""
    folder = current_directory()
    if source_of(ctx, name) is Source.FILE:
        folder = os.path.dirname(typed_on(ctx).defaults.values[name].file)
    for text in ctx.params[name]:
        path = os.path.join(folder, os.path.expanduser(text))
        if os.path.isfile(path):
            yield Setup(path, is_file=True)
        elif len(text.split()) == 1 and (text.endswith(".sh") or "/" in text):
            raise UsageError(f"--{name} {text}: no such file in {folder}", "a command has more than one word")
        elif text.strip():
            yield Setup(text)
