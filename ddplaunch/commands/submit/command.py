"""``ddplaunch submit``: from what was typed, and defaults in files, to a batch script and a job of Slurm.

``submit_gridengine``, ``submit_pbs`` and ``submit_lsf`` go on with jobs of other schedulers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.cli.batch_command import BatchCommand, given, headings, params, renamed, report, words_of_run
from ddplaunch.cli.batch_options import COMMON, HEADINGS, OF_SCHEDULERS, REFUSED, passed_on
from ddplaunch.cli.command_line import CommandLine, Translation, end_of_ours, name_of
from ddplaunch.cli.surroundings import check_token
from ddplaunch.cli.target_command import SETTINGS, remarks, spellings
from ddplaunch.cli.typed import current_directory, find_target
from ddplaunch.commands.submit.script import check_follow, prepare_log, requeue, setups, spared, take
from ddplaunch.errors import UsageError
from ddplaunch.queue.following import say

if TYPE_CHECKING:
    from ddplaunch.commands.submit.slurm import BatchJob


class _SubmitCommand(BatchCommand):
    own = HEADINGS
    refused = REFUSED
    elsewhere = dict.fromkeys(("--namespace", "--label"), "ddplaunch manifest")
    sections = headings(HEADINGS, REFUSED)
    common = COMMON
    examples = (
        ("2 nodes with 8 GPUs each", "ddplaunch submit --nodes 2 --gpus-per-node 8 --time 4:00:00 train.py --lr 0.1"),
        ("print the script; submit nothing", "ddplaunch submit --dry-run --nodes 2 train.py"),
        ("show the log as it grows", "ddplaunch submit --follow --partition a100 train.py"),
        ("4 jobs, with SLURM_ARRAY_TASK_ID 0 to 3", "ddplaunch submit --array 0-3 train.py"),
        ("go on after a preemption or the time limit", "ddplaunch submit --requeue 3 --time 1-00 train.py"),
    )

    def split(self, ctx: click.Context, typed: Translation) -> CommandLine:
        known, words = self.spellings(ctx), typed.words
        end = end_of_ours(words, known)
        if end < len(words) and (instead := passed_on(words[end:])):
            what = f"{name_of(words[end])} is an option of sbatch, which ddplaunch does not have"
            raise UsageError(what, f"pass it on: {instead}")
        for word in words[:end]:
            if word.startswith("--exclusive="):
                raise UsageError("--exclusive takes no value here", f"pass it on: --sbatch-arg={word}")
        return super().split(ctx, typed)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        words = None if extra.get("resilient_parsing") else _words_of_manifest(args)
        if words is None:
            return super().make_context(info_name, args, parent, **extra)
        from ddplaunch.commands.manifest.command import manifest

        say("--scheduler kubernetes is the former name of ddplaunch manifest")
        context = manifest.make_context(manifest.name, words, parent, **extra)
        tables = given(context).defaults.tables
        if "submit" in tables and "manifest" not in tables:
            what = f"{tables['submit']}: its table submit is not read for Kubernetes, and it has no table manifest"
            raise UsageError(what, "move the defaults for Kubernetes to a table manifest, or add --config none")
        return context


def _words_of_manifest(words: list[str]) -> list[str] | None:
    """The words without ``--scheduler kubernetes``; None if they do not say so before the target."""
    if not any("kubernetes" in word for word in words):  # most people need not load the other command
        return None
    from ddplaunch.commands.manifest.command import manifest

    try:
        end = end_of_ours(words, {**spellings(submit.params), **spellings(manifest.params)})
    except UsageError:  # said later, in its place
        return None
    for former in (["--scheduler=kubernetes"], ["--scheduler", "kubernetes"]):
        for index in range(end):
            if words[index : index + len(former)] == former:
                return words[:index] + words[index + len(former) :]
    return None


@click.command(
    cls=_SubmitCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=params(HEADINGS, REFUSED)
)
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    target: str,
    dry_run: bool,
    **_: object,
) -> int:
    """Submit a training job to Slurm, Grid Engine, PBS or LSF.

    Writes a batch script that runs `ddplaunch run` on each node, and hands it to sbatch, qsub or bsub. The options of
    `ddplaunch run` travel with the job.

    Defaults: [tool.ddplaunch.submit] in pyproject.toml, [submit] in ~/.config/ddplaunch.toml.
    """
    from ddplaunch.commands.submit import queue, slurm
    from ddplaunch.queue.scheduler import check_on_path

    scheduler = ctx.params["scheduler"]
    _check_scheduler(ctx, scheduler)
    if scheduler != "slurm":
        _check_target(ctx)
        return _submit_to(scheduler)(ctx, target)
    job = _job(ctx, target)
    check_follow(ctx)
    if job.container_image is None:  # else the target may be in the image only
        _check_target(ctx)
    check_token(None)
    script = slurm.script(job)
    otherwise = {"job-name": "the target", "output": "default", "nodes": "default"}
    interpreter = f"interpreter: {job.interpreter} ({'of the image' if job.container_image else 'this one'})"
    more = (f"chdir: {job.chdir} (the current directory)", interpreter)
    report(ctx, vars(job), otherwise, _advice(job), queue.OVERRIDES, more, dry_run=dry_run)
    if dry_run:
        click.echo(os.fsencode(script), nl=False)  # as sbatch would get it: of text, click drops escape sequences
        return 0
    itself = queue.Slurm()
    check_on_path(itself.submits, itself.system, os.environ)
    if job.container_image and not queue.has_containers():
        say("srun has no --container-image here: the job fails, unless the nodes have pyxis")
    prepare_log(job.chdir, "--output", job.output)
    if job.error:
        prepare_log(job.chdir, "--error", job.error)
    log, errors = partial(slurm.log_path, job), partial(slurm.log_path, job, pattern=job.error) if job.error else None
    return take(ctx, target, job, script, itself, log, errors)


def _submit_to(scheduler: str) -> Callable[[click.Context, str], int]:
    """What submits to a scheduler other than Slurm."""
    if scheduler == "sge":
        from ddplaunch.commands.submit.gridengine_options import submit_to_gridengine as submit_to
    elif scheduler == "pbs":
        from ddplaunch.commands.submit.pbs_options import submit_to_pbs as submit_to
    else:
        from ddplaunch.commands.submit.lsf_options import submit_to_lsf as submit_to
    return submit_to


def _check_scheduler(ctx: click.Context, scheduler: str) -> None:
    """Refuse options of another scheduler that nothing else would."""
    for name, of in OF_SCHEDULERS.items():
        value = ctx.params[name]
        if value and scheduler not in of:
            option = next(param.opts[0] for param in ctx.command.params if param.name == name)
            text = value if isinstance(value, str) else " ".join(value)
            what = f"{option} {text} needs --scheduler {' or '.join(of)}"
            raise UsageError(what, f"for {scheduler} leave {option} out")


def _check_target(ctx: click.Context) -> None:
    """Refuse a target that ``run`` would refuse, and a TensorBoard that is not there."""
    values = ctx.params
    try:
        find_target(
            values["target"],
            values["args"],
            module=values["module"],
            no_python=values["no_python"],
            pass_local_rank=values["pass_local_rank"],
            start=values["start"],
            preload=values["preload"],
            alike=remarks().alike,
        )
    except UsageError as error:
        raise renamed(ctx.command, error) from None
    if values["tensorboard"] is not None:
        from ddplaunch.cli.sidecars import check_tensorboard

        check_tensorboard(values["tensorboard"])


def _job(ctx: click.Context, target: str) -> BatchJob:
    """Read the options into a job; refuse what does not fit together, and a file of --setup that is missing."""
    from ddplaunch.commands.submit import conflicts as submit_conflicts
    from ddplaunch.commands.submit.slurm import BatchJob

    given = ctx.params
    memory = submit_conflicts.memory(ctx)
    job = BatchJob(
        command=words_of_run(ctx),
        interpreter="python" if given["container_image"] else sys.executable,
        chdir=current_directory(),
        job_name=given["job_name"] or os.path.basename(target),
        output=given["output"] or ("slurm-%A_%a.out" if given["array"] else "slurm-%j.out"),
        error=given["error"],
        nodes=given["nodes"] + given["spares"],
        gpus_per_node=given["gpus_per_node"],
        gpus_per_task=given["gpus_per_task"],
        gres=given["gres"],
        cpus_per_task=given["cpus_per_task"],
        mem=memory["mem"],
        mem_per_gpu=memory["mem-per-gpu"],
        mem_per_cpu=memory["mem-per-cpu"],
        time=given["time"],
        partition=given["partition"],
        account=given["account"],
        qos=given["qos"],
        constraint=given["constraint"],
        nodelist=given["nodelist"],
        exclude=given["exclude"],
        exclusive=given["exclusive"],
        reservation=given["reservation"],
        dependency=given["dependency"],
        mail_type=given["mail_type"],
        mail_user=given["mail_user"],
        comment=given["comment"],
        array=given["array"],
        sbatch_args=given["sbatch_args"],
        srun_args=given["srun_args"],
        setup=tuple(setups(ctx, "setup")),
        teardown=tuple(setups(ctx, "teardown")),
        container_image=given["container_image"],
        container_mounts=given["container_mounts"],
        spares=given["spares"],
        requeue=requeue(ctx) if given["requeue"] else None,
    )
    submit_conflicts.check(job)
    return job


def _advice(job: BatchJob) -> Iterator[str]:
    yield from spared(job)
    passed = any("cpus-per" in arg or "exclusive" in arg for arg in job.sbatch_args)
    if job.cpus_per_task is None and not job.exclusive and not passed:
        yield "without --cpus-per-task all ranks of a node share one CPU, unless the site's Slurm gives more"
    if job.container_image:
        yield "the target was not checked: it is in the image"
