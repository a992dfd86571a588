"""``ddplaunch manifest``: from what was typed, and defaults in files, to YAML for Kubernetes."""

from __future__ import annotations

import click

from ddplaunch.cli.batch_command import BatchCommand, headings, notes, params, report
from ddplaunch.cli.manifest_options import COMMON, HEADINGS, REFUSED, pod_job
from ddplaunch.cli.target_command import SETTINGS


class _ManifestCommand(BatchCommand):
    own = HEADINGS
    refused = REFUSED
    sections = headings(HEADINGS, REFUSED)
    common = COMMON
    examples = (
        (
            "2 nodes with 8 GPUs each; create the job",
            "ddplaunch manifest --container-image wine:1 --nodes 2 --gpus-per-node 8 train.py | kubectl apply -f -",
        ),
        (
            "mount a PersistentVolumeClaim",
            "ddplaunch manifest --container-image wine:1 --container-mounts my-claim:/data train.py",
        ),
        (
            "set a variable, and a label",
            "ddplaunch manifest --container-image wine:1 --env NCCL_DEBUG=INFO --label team=vision train.py",
        ),
    )


@click.command(
    cls=_ManifestCommand,
    options_metavar="[OPTIONS]",
    context_settings=SETTINGS,
    params=params(HEADINGS, REFUSED),
)
@click.pass_context
def manifest(ctx: click.Context, /, target: str, dry_run: bool, **_: object) -> int:
    """Print a training job for Kubernetes as YAML.

    Prints an indexed Job, whose pods are the nodes, and the Service that lets them find each other. Each pod runs
    `ddplaunch run`; the options of that command travel with the job. The image must have ddplaunch and TARGET.

    Defaults: [tool.ddplaunch.manifest] in pyproject.toml, [manifest] in ~/.config/ddplaunch.toml.
    """
    from ddplaunch.submit import kubernetes

    job = pod_job(ctx, target)
    click.echo(kubernetes.manifest(job).encode(), nl=False)  # kubectl reads UTF-8, whatever the terminal does
    values = {**ctx.params, "job_name": job.name}
    report(ctx, values, {"job-name": "the target", "nodes": "default"}, notes(ctx), dry_run=dry_run)
    return 0
