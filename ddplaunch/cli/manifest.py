"""``ddplaunch manifest``: from what was typed, and defaults in files, to YAML for Kubernetes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

import click

from ddplaunch.cli import batch_command
from ddplaunch.cli.batch_command import CONFIG, CPUS, JOB_NAME, MEMORY, NODES, TIME, BatchCommand, like, option, wrong
from ddplaunch.cli.submit_options import HEADINGS as OF_SUBMIT
from ddplaunch.cli.surroundings import TOKEN, check_token
from ddplaunch.cli.target_command import SETTINGS
from ddplaunch.errors import UsageError
from ddplaunch.submit import kubernetes
from ddplaunch.submit.kubernetes import NAME, OWN_VARIABLES, Mount, PodJob, longest_name, name_from

REFUSED = {
    **{name: hint for name, hint in batch_command.REFUSED.items() if name != "--env"},
    "--token": "--env DDPLAUNCH_TOKEN=SECRET; everyone who may read the job can read it",
    "--json": "leave it out: the output is YAML",
}
"""Options that a job of Kubernetes cannot have, and what to type instead."""

_SHORT = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"([a-z0-9][a-z0-9.-]{{0,252}}/)?{_SHORT}"
_LABEL = re.compile(rf"(?P<key>{_KEY})=(?P<value>({_SHORT})?)", re.ASCII)
"""A label, as in "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3" (Labels and Selectors in Kubernetes' manual)."""

_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_.-][\w.-]*", re.ASCII)


def _gpus(ctx: click.Context, param: click.Parameter, text: str | None) -> int:
    kind, _, number = (text or "0").rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise wrong(ctx, param, text or "", "expected a number of GPUs, like 8")
    if kind:
        hint = f"--gpus-per-node {number} --constraint nvidia.com/gpu.product=NAME, a label of the nodes with such GPUs"
        raise wrong(ctx, param, text or "", "Kubernetes counts GPUs of all types alike", hint)
    return int(number)


def _labels(ctx: click.Context, param: click.Parameter, texts: Sequence[str] | str | None) -> tuple[str, ...]:
    """Check KEY=VALUE, given several times, or in one list."""
    found = tuple(texts.split(",")) if isinstance(texts, str) else tuple(texts or ())
    for text in found:
        if not _LABEL.fullmatch(text):
            example = "team=vision" if param.multiple else "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"
            raise wrong(ctx, param, text, f"expected KEY=VALUE, like {example}")
    return found


def _variables(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check NAME=VALUE, or NAME for this shell's value."""
    for text in texts:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise wrong(ctx, param, text, "expected NAME=VALUE, or NAME for its value in this shell")
        if name in OWN_VARIABLES:
            raise wrong(ctx, param, text, f"ddplaunch sets {name} in each pod", "leave it out")
        if not equals and name not in os.environ:
            raise wrong(ctx, param, text, f"{name} is not set here", f"--env {name}=VALUE")
        if name == TOKEN:
            check_token(value if equals else os.environ[name], f"--env {TOKEN}")
    return texts


def _mounts(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[Mount, ...]:
    used = {"/dev/shm": "ddplaunch mounts memory"}
    mounts = []
    for text in (each for value in texts for each in value.split(",") if each):
        source, path, flags, *rest = (*text.split(":"), "", "")
        if any(rest) or flags not in ("", "ro", "rw") or not path.startswith("/"):
            raise wrong(ctx, param, text, "expected SRC:DST, like my-claim:/data or /data:/data:ro")
        if not source.startswith("/") and not _CLAIM.fullmatch(source):
            what = f"{source or 'nothing'} is neither an absolute path on the nodes nor the name of a claim"
            raise wrong(ctx, param, text, what, "kubectl get pvc shows the PersistentVolumeClaims")
        if path in used:
            raise wrong(ctx, param, text, f"{used[path]} at {path} already", "choose another DST")
        used[path] = f"{source} is mounted"
        mounts.append(Mount(source, path, flags == "ro"))
    return tuple(mounts)


HEADINGS = {
    "Resources": (
        NODES,
        option("--gpus-per-node", "N", "GPUs on each node. Each gets a rank, unless --nproc says otherwise.", _gpus),
        CPUS,
        option("--mem", "SIZE", "Memory on each node, like 200G; 0 sets no limit.", MEMORY),
        TIME,
    ),
    "For Kubernetes": (
        option(
            "--namespace",
            "NAME",
            "Namespace of the job.  [default: kubectl's]",
            like(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and dashes"),
        ),
        JOB_NAME,
        option(
            "--label labels",
            "KEY=VALUE",
            "A label for the job and its pods, like team=vision; kueue.x-k8s.io/queue-name=NAME is a queue of Kueue",
            _labels,
            multiple=True,
        ),
        option("--constraint", "LIST", "Labels that the nodes must have, KEY=VALUE,…", _labels),
        CONFIG,
    ),
    "Environment of the job": (
        option(
            "--container-image",
            "IMAGE",
            "Image of the pods; it must have ddplaunch and the target.",
            like(r"[a-z0-9][\w./:@-]*", "an image like nvcr.io/nvidia/pytorch:25.01-py3"),
        ),
        option(
            "--container-mounts",
            "LIST",
            "SRC:DST,… to mount; SRC is a folder of the node, or a PersistentVolumeClaim",
            _mounts,
            multiple=True,
        ),
        option(
            "--env",
            "NAME[=VALUE]",
            "A variable for the pods; without a value, the value in this shell",
            _variables,
            multiple=True,
        ),
    ),
    "Dry run and help": (
        click.Option(["--dry-run"], is_flag=True, help="Print also the source of each value, on stderr."),
    ),
}
"""The options under their headings in the help."""

COMMON = (
    "--container-image", "--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--nproc",
    "--container-mounts", "--env", "--namespace", "--label", "--dry-run", "--help", "--help-all",
)  # fmt: skip
"""The options that most people need."""


_WINE = "ddplaunch manifest --container-image wine:1"


class _ManifestCommand(BatchCommand):
    own = HEADINGS
    elsewhere = dict.fromkeys((each.opts[-1] for each in batch_command.options_of(OF_SUBMIT)), "ddplaunch submit")
    refused = REFUSED
    sections = batch_command.headings(HEADINGS, REFUSED)
    common = COMMON
    examples = (
        (
            "2 nodes with 8 GPUs each; create the job",
            f"{_WINE} --nodes 2 --gpus-per-node 8 train.py | kubectl apply -f -",
        ),
        ("mount a PersistentVolumeClaim", f"{_WINE} --container-mounts my-claim:/data train.py"),
        ("set a variable, and a label", f"{_WINE} --env NCCL_DEBUG=INFO --label team=vision train.py"),
    )


_PARAMS = batch_command.params(HEADINGS, REFUSED)


@click.command(cls=_ManifestCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=_PARAMS)
@click.pass_context
def manifest(ctx: click.Context, /, target: str, dry_run: bool, **_: object) -> int:
    """Print a training job for Kubernetes as YAML.

    Prints an indexed Job, whose pods are the nodes, and the Service that lets them find each other. Each pod runs
    `ddplaunch run`; the options of that command travel with the job. The image must have ddplaunch and TARGET.

    Defaults: [tool.ddplaunch.manifest] in pyproject.toml, [manifest] in ~/.config/ddplaunch.toml.
    """
    job = _pod_job(ctx, target)
    click.echo(kubernetes.manifest(job).encode(), nl=False)  # kubectl reads UTF-8, whatever the terminal does
    values = {**ctx.params, "job_name": job.name}
    batch_command.report(ctx, values, {"job-name": "the target", "nodes": "default"}, dry_run=dry_run)
    return 0


def _pod_job(ctx: click.Context, target: str) -> PodJob:
    """Read the options into a job; refuse one without an image, or with a name that Kubernetes does not take."""
    given = ctx.params
    if given["container_image"] is None:
        hint = "--container-image REGISTRY/NAME:TAG, an image with ddplaunch and the target"
        raise UsageError("--container-image is missing: a pod runs in an image", hint)
    return PodJob(
        command=batch_command.words_of_run(ctx),
        name=_name(ctx, target, given["job_name"], given["nodes"]),
        image=given["container_image"],
        nodes=given["nodes"],
        gpus=given["gpus_per_node"],
        cpus=given["cpus_per_task"],
        memory=_memory(given["mem"]),
        seconds=batch_command.seconds(given["time"] or "UNLIMITED"),
        grace=given["grace"],
        preempt_grace=given["preempt_grace"] if given["preempt_signal"] == signal.SIGTERM else 0.0,
        namespace=given["namespace"],
        labels=dict(text.split("=", 1) for text in given["labels"]),
        node_labels=dict(text.split("=", 1) for text in given["constraint"]),
        variables=dict(text.split("=", 1) if "=" in text else (text, os.environ[text]) for text in given["env"]),
        mounts=given["container_mounts"],
    )


def _name(ctx: click.Context, target: str, asked: str | None, nodes: int) -> str:
    if asked is None:
        return name_from(target, nodes)
    if not NAME.fullmatch(asked) or len(asked) > longest_name(nodes):
        rule = f"expected small letters, digits and dashes, a letter first, at most {longest_name(nodes)}"
        raise wrong(ctx, JOB_NAME, asked, rule, f"--job-name {name_from(asked, nodes)}")
    return asked


def _memory(text: str | None) -> str | None:
    """Slurm's units are powers of 1024, and M without a unit; 0 means unlimited."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)B?", text or "0", re.IGNORECASE).groups()  # type: ignore[union-attr]
    return f"{int(number)}{(unit or 'M').upper()}i" if int(number) else None
