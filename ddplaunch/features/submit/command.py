"""``ddplaunch submit``: the command that turns options and defaults into a batch script, and submits it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise, takewhile
from typing import Any

import click

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.argv_splitter import ArgvParts, TranslatedArgv, end_of_options, option_name
from ddplaunch.cli.cluster_detection import check_token
from ddplaunch.cli.target_command import SETTINGS
from ddplaunch.features.programs.sidecars import check_tensorboard
from ddplaunch.features.submit.batch_command import (
    BatchCommand,
    all_params,
    check_program_nodes,
    find_local_target,
    option_sections,
)
from ddplaunch.features.submit.batch_scheduler import BatchScheduler, submit_job
from ddplaunch.features.submit.code_copies import read_code
from ddplaunch.features.submit.options import (
    COMMON_OPTIONS,
    HEADINGS,
    REFUSED_OPTIONS,
    SCHEDULER_OPTIONS,
    pass_through_words,
)
from ddplaunch.features.submit.via import submit_via
from ddplaunch.system.schedulers import scheduler_registry


class _SubmitCommand(BatchCommand):
    own_options = HEADINGS
    refused_options = REFUSED_OPTIONS
    foreign_options = dict.fromkeys(("--namespace", "--label"), "ddplaunch manifest")
    sections = option_sections(HEADINGS, REFUSED_OPTIONS)
    common = COMMON_OPTIONS
    examples = (
        ("2 nodes with 8 GPUs each", "ddplaunch submit --nodes 2 --gpus-per-node 8 --time 4:00:00 train.py --lr 0.1"),
        ("print the script without submitting it", "ddplaunch submit --dry-run --nodes 2 train.py"),
        ("follow the log", "ddplaunch submit --follow --partition a100 train.py"),
        ("4 jobs, with SLURM_ARRAY_TASK_ID 0 to 3", "ddplaunch submit --array 0-3 train.py"),
        ("6 runs, of all combinations", "ddplaunch submit --grid '--lr 0.1,0.2' --grid '--seed 1,2,3' train.py"),
        ("requeue after a preemption or the time limit", "ddplaunch submit --requeue 3 --time 1-00 train.py"),
    )

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make the click context of this command, or of the command that the chosen scheduler has instead."""
        if module := scheduler_registry.SUBMIT_COMMANDS.get(_typed_scheduler(args)):
            command: click.Command = import_module(module).submit
            return command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def split_argv(self, ctx: click.Context, typed: TranslatedArgv) -> ArgvParts:
        known, words = self.spellings(ctx), typed.argv
        end = end_of_options(words, known)
        if end < len(words) and (instead := pass_through_words(words[end:])):
            what = f"{option_name(words[end])} is an option of sbatch, not of ddplaunch"
            raise UsageError(what, f"pass it on: {instead}")
        for word in words[:end]:
            if word.startswith("--exclusive="):
                raise UsageError("--exclusive takes no value here", f"pass it on: --sbatch-arg={word}")
        return super().split_argv(ctx, typed)


def _typed_scheduler(args: Sequence[str]) -> str:
    """Return the last value of --scheduler before the arguments of the program; "" if there is none."""
    words = [*takewhile(lambda word: word != "--", args), ""]
    values = [after for word, after in pairwise(words) if word == "--scheduler"]
    values += [word.partition("=")[2] for word in words if word.startswith("--scheduler=")]
    return values[-1] if values else ""


@click.command(
    cls=_SubmitCommand,
    options_metavar="[OPTIONS]",
    context_settings=SETTINGS,
    params=all_params(HEADINGS, REFUSED_OPTIONS),
)
@click.pass_context
def submit(ctx: click.Context, /, target: str, **_: object) -> int:
    """Submit a training job to Slurm, Grid Engine, PBS, LSF, Kubernetes, or this machine.

    Writes a batch script that executes `ddplaunch run` on each node, with the options of that command given here, and
    submits it with sbatch, qsub or bsub. With `--scheduler local`, the job runs on this machine when its GPUs, or CPUs,
    are free, also after the terminal is closed. Kubernetes has options of its own: `ddplaunch submit --scheduler
    kubernetes --help`.

    Defaults: [tool.ddplaunch.submit] in pyproject.toml, [submit] in ~/.config/ddplaunch.toml.
    """
    name = ctx.params["scheduler"]
    _check_scheduler(ctx, name)
    if ctx.params["via"]:
        return submit_via(ctx, target)
    if ctx.params["remote_python"]:
        raise UsageError(f"--remote-python {ctx.params['remote_python']} works only with --via", "--via login.cluster")
    scheduler = scheduler_registry.make_scheduler(name)
    assert isinstance(scheduler, BatchScheduler)
    if name != "local" and (option := next((each for each in ("jobs", "wait") if ctx.params[each]), None)):
        raise UsageError(f"--{option} needs --scheduler local", f"{scheduler.title} has a queue of its own")
    job = scheduler.read_job(ctx, target)
    if job.array and ctx.params["follow"]:
        option = "--grid" if job.grid else f"--array {job.array}"
        what = f"--follow does not work with {option}: each job has its own log"
        raise UsageError(what, "leave one of them out")
    if job.array and ctx.params.get("program"):
        option = "--grid" if job.grid else f"--array {job.array}"
        raise UsageError(f"{option} does not work with several programs", "submit each job by itself")
    check_program_nodes(ctx, target, job.nodes)
    local_target = None
    if job.container_image is None:  # with an image, the target may exist only there
        local_target = find_local_target(ctx)
        if (folder := ctx.params["tensorboard"]) is not None:
            check_tensorboard(folder)
    check_token(None)
    return submit_job(scheduler, ctx, target, job, read_code(ctx, job.chdir, local_target))


def _check_scheduler(ctx: click.Context, scheduler: str) -> None:
    """Raise UsageError for options of another scheduler that no other check rejects."""
    for name, of in SCHEDULER_OPTIONS.items():
        value = ctx.params[name]
        if value and scheduler not in of:
            option = next(param.opts[-1] for param in ctx.command.params if param.name == name)
            text = value if isinstance(value, str) else " ".join(value)
            what = f"{option} {text} needs --scheduler {' or '.join(of)}"
            raise UsageError(what, f"for {scheduler} leave {option} out")
