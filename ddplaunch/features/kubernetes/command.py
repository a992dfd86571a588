"""``ddplaunch submit --scheduler kubernetes``: creates the job that ``ddplaunch manifest`` would print."""

from __future__ import annotations

import os
import shutil
import time

import click
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.redaction import redact_words, redacted_argv
from ddplaunch.base.safe_files import current_folder
from ddplaunch.cli.cluster_detection import check_token
from ddplaunch.cli.target_command import SETTINGS
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.features.kubernetes import kubectl
from ddplaunch.features.kubernetes.kubectl import Place
from ddplaunch.features.kubernetes.scheduler import MANAGED, Kubernetes, job_number
from ddplaunch.features.kubernetes.submission import create_job
from ddplaunch.features.manifest import kubernetes
from ddplaunch.features.manifest.command import COMMON, SUFFIX_LENGTH, job_notes, read_pod_code, read_pod_job
from ddplaunch.features.manifest.options import HEADINGS as OF_MANIFEST
from ddplaunch.features.manifest.options import REFUSED as REFUSED_BY_MANIFEST
from ddplaunch.features.manifest.pod_job import PodJob
from ddplaunch.features.submit import batch_command
from ddplaunch.features.submit.batch_command import BatchCommand, parsed_line
from ddplaunch.features.submit.options import HEADINGS as OF_SUBMIT
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.log_follower import LogFollower, follow_job, print_line
from ddplaunch.system.schedulers.scheduler import QUICK_TIMEOUT_S, JobId
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

INSTANCE = "app.kubernetes.io/instance"  # a label with the job's name

_REPLACED = ("--unique-name", "--dry-run")
HEADINGS = {
    **{
        heading: tuple(option for option in options if option.opts[-1] not in _REPLACED)
        for heading, options in OF_MANIFEST.items()
    },
    "After the start": (
        click.Option(["--scheduler", "batch_scheduler"], metavar="NAME", hidden=False, help="Scheduler: kubernetes."),
        click.Option(
            ["--unique-name/--no-unique-name"],
            default=True,
            show_default=True,
            help="Append five random characters to the name.",
        ),
        click.Option(
            ["--follow/--no-follow"], default=False, help="Follow the logs, and exit with the job's exit code."
        ),
    ),
    "Dry run and help": (
        click.Option(["--dry-run"], is_flag=True, help="Print the manifest and the source of each value, and exit."),
    ),
}
"""Options by heading of the help."""

REFUSED = {**REFUSED_BY_MANIFEST, "--json": "--dry-run prints the manifest"}

_WINE = "ddplaunch submit --scheduler kubernetes --container-image wine:1"


class _KubernetesSubmitCommand(BatchCommand):
    own_options = HEADINGS
    defaults_table = "manifest"
    foreign_options = dict.fromkeys(
        (each.opts[-1] for each in batch_command.flatten_options(OF_SUBMIT)), "ddplaunch submit --scheduler slurm"
    )
    refused_options = REFUSED
    sections = batch_command.option_sections(HEADINGS, REFUSED)
    common = (*COMMON, "--follow", "--unique-name")
    examples = (
        ("2 nodes with 8 GPUs each", f"{_WINE} --nodes 2 --gpus-per-node 8 train.py"),
        ("follow the logs", f"{_WINE} --follow train.py"),
        ("print the manifest without creating the job", f"{_WINE} --dry-run train.py"),
    )


@click.command(
    "submit",
    cls=_KubernetesSubmitCommand,
    options_metavar="[OPTIONS]",
    context_settings=SETTINGS,
    params=batch_command.all_params(HEADINGS, REFUSED),
)
@click.pass_context
def submit(ctx: click.Context, /, target: str, dry_run: bool, **_: object) -> int:
    """Submit a training job to Kubernetes.

    Creates the objects that `ddplaunch manifest` prints, with kubectl, in its current context. The image must contain
    ddplaunch and TARGET.

    Defaults: [tool.ddplaunch.manifest] in pyproject.toml, [manifest] in ~/.config/ddplaunch.toml.
    """
    code = read_pod_code(ctx, target)
    job = _add_run_id_and_labels(ctx, read_pod_job(ctx, target, code))
    params = {name: value for name, value in ctx.params.items() if name not in ("follow", "batch_scheduler")}
    sources, notes = {"job-name": "the target", "nodes": "default"}, job_notes(job, code, dry_run=dry_run)
    batch_command.print_value_sources(ctx, {**params, "job_name": job.name}, sources, notes, dry_run=dry_run)
    if dry_run:
        click.echo(kubernetes.render_manifest(job).encode(), nl=False)
        return 0
    check_token(None)
    if shutil.which(kubectl.PROGRAM) is None:
        what = "kubectl is not on PATH: this machine has no commands of Kubernetes"
        raise UsageError(what, f"{Kubernetes.missing_hint}; --dry-run prints the manifest on any machine")
    place = kubectl.read_current_namespace(job.namespace, os.environ, QUICK_TIMEOUT_S)
    create_job(place, replace(job, namespace=place.namespace))
    return _record_and_follow(ctx, target, job, place, code)


def _add_run_id_and_labels(ctx: click.Context, job: PodJob) -> PodJob:
    """Return the job with a run id and ddplaunch's labels added; commands in its pods name the run by this id."""
    run_id = () if ctx.params["run_id"] else ("--run-id", job.name)
    labels = {**job.labels, MANAGED: "ddplaunch", INSTANCE: job.name}  # ``ps`` lists jobs by the first
    return replace(job, command=(*run_id, *job.command), labels=labels)


def _record_and_follow(ctx: click.Context, target: str, job: PodJob, place: Place, code: CodeArchive | None) -> int:
    """Store a submitted job, print how to follow and stop it, and follow it if asked to; return the exit code."""
    params = ctx.params
    which = JobId(job_number(job.kind, job.name), str(place))
    saved = SubmittedJob(
        number=which.number,
        cluster=which.cluster,
        name=job.name[:-SUFFIX_LENGTH] if params["unique_name"] else job.name,
        target=" ".join([target, *redact_words(parsed_line(ctx).line.program_args)]),
        nodes=job.nodes,
        array=None,
        cwd=current_folder(),
        log="",
        run_id=params["run_id"] or job.name,
        python="python",
        image=None,
        moment=time.time(),
        scheduler="kubernetes",
        code_version=code.version if code else None,
        argv=redacted_argv(),
        typed_in=current_folder(),
    )
    is_saved = not params["no_history"] and submitted_jobs.save_job(saved)
    context = f"context {place.context}, " if place.context else ""
    lines = [f"job {which.number}: {target} on {job.nodes} node{'s' * (job.nodes > 1)}"]
    lines += [f"cluster: {context}namespace {place.namespace}"]
    lines += [f"code: {code}"] if code else []
    stop = f"cancel: ddplaunch stop {which.number}"
    if not params["follow"]:
        click.echo(os.fsencode("\n".join([*lines, f"follow: ddplaunch attach {which.number}", stop])))
        return 0
    for line in (*lines, stop):
        print_line(line)
    follower = LogFollower(which, Kubernetes())
    return follow_job(follower, f"ddplaunch logs {which.number}", saved if is_saved else None)
