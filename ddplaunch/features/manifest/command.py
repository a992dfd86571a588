"""``ddplaunch manifest``: the command that turns options and defaults into a Kubernetes manifest (YAML)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import click
from click.core import ParameterSource

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import closest_match
from ddplaunch.cli.target_args import require_current_folder
from ddplaunch.cli.target_command import SETTINGS
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.features.code.config_maps import build_code_volume
from ddplaunch.features.manifest import kubernetes, values
from ddplaunch.features.manifest.options import HEADINGS, REFUSED
from ddplaunch.features.manifest.pod_job import (
    COSCHEDULING,
    JOBSET,
    MAX_DNS_LABEL,
    NAME,
    TRAINJOB,
    VOLCANO,
    PodGroup,
    PodJob,
    derive_job_name,
    max_name_length,
)
from ddplaunch.features.manifest.pod_spec import find_rdma_resource
from ddplaunch.features.submit import batch_command
from ddplaunch.features.submit.batch_command import JOB_NAME, BatchCommand, invalid_value_error
from ddplaunch.features.submit.code_copies import NO_CODE, read_code
from ddplaunch.features.submit.options import HEADINGS as OF_SUBMIT
from ddplaunch.system.plan.rendezvous import DEFAULT_PORT

_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # as in Kubernetes' generated names: without vowels no words appear
SUFFIX_LENGTH = 6  # characters that --unique-name appends: a dash and five of these

COMMON = (
    "--container-image", "--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--nproc",
    "--container-mounts", "--env", "--namespace", "--label", "--resource", "--toleration", "--dry-run", "--help",
    "--help-all",
)  # fmt: skip
"""The options that most people need."""


_WINE, _APPLY = "ddplaunch manifest --container-image wine:1", "| kubectl apply -f -"


class _ManifestCommand(BatchCommand):
    own_options = HEADINGS
    foreign_options = dict.fromkeys(
        (each.opts[-1] for each in batch_command.flatten_options(OF_SUBMIT)), "ddplaunch submit"
    )
    refused_options = REFUSED
    sections = batch_command.option_sections(HEADINGS, REFUSED)
    common = COMMON
    examples = (
        ("2 nodes with 8 GPUs each; create the job", f"{_WINE} --nodes 2 --gpus-per-node 8 train.py {_APPLY}"),
        ("mount a PersistentVolumeClaim", f"{_WINE} --container-mounts my-claim:/data train.py"),
        ("RDMA, on nodes with a taint", f"{_WINE} --resource rdma/hca=8 --toleration nvidia.com/gpu train.py"),
        ("set a variable, and a label", f"{_WINE} --env NCCL_DEBUG=INFO --label team=vision train.py"),
    )


_PARAMS = batch_command.all_params(HEADINGS, REFUSED)


@click.command(cls=_ManifestCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=_PARAMS)
@click.pass_context
def manifest(ctx: click.Context, /, target: str, dry_run: bool, **_: object) -> int:
    """Print a training job as YAML for Kubernetes.

    Prints an indexed Job, whose pods are the nodes, with a Service for their names; or a JobSet. Each pod executes
    `ddplaunch run` with the options of that command given here. The image must contain ddplaunch and TARGET.

    Defaults: [tool.ddplaunch.manifest] in pyproject.toml, [manifest] in ~/.config/ddplaunch.toml.
    """
    code = read_pod_code(ctx, target)
    job = read_pod_job(ctx, target, code)
    click.echo(kubernetes.render_manifest(job).encode(), nl=False)  # kubectl reads UTF-8, whatever the terminal does
    params = {**ctx.params, "job_name": job.name}
    sources, notes = {"job-name": "the target", "nodes": "default"}, job_notes(job, code, dry_run=dry_run)
    batch_command.print_value_sources(ctx, params, sources, notes, dry_run=dry_run)
    return 0


def read_pod_code(ctx: click.Context, target: str) -> CodeArchive | None:
    """Pack the folder of --code; return None without one. Raises UsageError if a script would not run from the copy."""
    params, path = ctx.params, target.partition(":")[0]
    if params["code"] in (None, NO_CODE):
        return None
    is_in_copy = path.endswith(".py") and not os.path.isabs(path) and not (params["module"] or params["no_python"])
    local_target = None
    try:
        local_target = batch_command.find_local_target(ctx)
    except UsageError:
        if is_in_copy:
            raise  # other targets may be in the image alone
    return read_code(ctx, require_current_folder(), local_target)


def job_notes(job: PodJob, code: CodeArchive | None, *, dry_run: bool) -> Iterator[str]:
    """Yield notes for the user: on files that are not copied and, in a dry run, on missing sizes and on images."""
    yield from code.notes if code else ()
    if not dry_run:
        return
    if not job.memory and "memory" not in {*job.requests, *job.resources}:
        yield "without --mem the pods reserve no memory: Kubernetes ends such pods first if a machine runs short"
    if not job.cpus_per_task and "cpu" not in {*job.requests, *job.resources}:
        yield "without --cpus-per-task the pods reserve no CPUs: they get what other pods there leave"
    if len({each.image for each in job.groups}) > 1:
        yield "every image must have ddplaunch: pip install ddplaunch"


def read_pod_job(ctx: click.Context, target: str, code: CodeArchive | None) -> PodJob:
    """Return the job of these options. Raises UsageError if the image is missing, or values contradict each other."""
    params = ctx.params
    if params["image"] is None:
        hint = "--container-image REGISTRY/NAME:TAG, an image with ddplaunch and the target"
        raise UsageError("--container-image is missing: a pod runs in an image", hint)
    lowest, nodes = values.parse_node_range(params["nodes"])
    if params["grow"] and lowest == nodes:
        raise UsageError(f"--grow does not work with --nodes {nodes}", f"--nodes {nodes}:{nodes + 1}")
    most = nodes + params["spares"]
    groups = _pod_groups(ctx, target, most, is_elastic=lowest != most)
    from_options: dict[str, Any] = {name: params[name] for name in PodJob.__struct_fields__ if name in params}
    name = _job_name(ctx, target, most, groups)
    derived: dict[str, Any] = {
        "command": batch_command.run_argv(ctx),
        "name": name,
        "code": build_code_volume(code, name, code.run_folder(require_current_folder())) if code else None,
        "kind": JOBSET if groups else params["kind"],
        "groups": groups,
        "nodes": most,
        "min_nodes": lowest if lowest != most else None,
        "resources": _parse_quantities(params["resources"]),
        "requests": _parse_quantities(params["requests"]),
        "seconds": batch_command.parse_time_s(params["time"] or "UNLIMITED"),
        "preempt_grace": params["preempt_grace"] if params["preempt_signal"] == signal.SIGTERM else 0.0,
        "ttl_s": batch_command.parse_time_s(params["ttl"]) if params["ttl"] else None,
        "labels": values.parse_key_values(params["labels"]),
        "annotations": values.parse_key_values(params["annotations"]),
        "host_ports": _ports(ctx) if params["host_network"] and nodes > 1 else (),
        "variables": values.parse_key_values(
            [text if "=" in text else f"{text}={os.environ[text]}" for text in params["env"]]
        ),
    }
    job = PodJob(**{**from_options, **derived})
    _check_consistency(job)
    return job


def _parse_quantities(texts: Sequence[str]) -> dict[str, str | int]:
    """Parse texts NAME=N into Kubernetes' quantities: a number for CPUs and devices, else a size."""
    quantities: dict[str, str | int] = {}
    for name, value in values.parse_key_values(texts).items():
        if name == "cpu" or "/" in name:
            quantities[name] = int(value) if value.isdigit() else value
        else:
            quantities[name] = values.to_kubernetes_size(value) or 0
    return quantities


def _check_consistency(job: PodJob) -> None:
    """Raise UsageError for values that contradict each other; Kubernetes would reject them only later."""
    for each in job.secrets:
        name = each.partition("=")[0]
        if name in job.variables:
            raise UsageError(f"--env-secret {each}: --env also sets {name}", "leave one of them out")
    limits: dict[str, str | int | None] = {"cpu": job.cpus_per_task, "memory": job.memory, **job.resources}
    for name, request in job.requests.items():
        limit = limits.get(name)
        if limit is not None and values.parse_quantity(str(request)) > values.parse_quantity(str(limit)):
            option = values.OWN_OPTIONS.get(name, f"--resource {name}=")
            raise UsageError(f"--request {name}={request} is more than the limit of {limit}", f"raise {option}")
    if job.shm and job.memory and values.parse_quantity(job.shm) > values.parse_quantity(job.memory):
        what = f"--shm-size {job.shm} is more than --mem {job.memory}; /dev/shm counts as memory"
        raise UsageError(what, "raise --mem")
    if job.runtime and job.kind != TRAINJOB:
        raise UsageError(f"--runtime {job.runtime} is for a TrainJob", "--kind trainjob")
    if job.restricted and (violation := _find_restricted_violation(job)):
        raise UsageError(f"--restricted does not allow {violation}", "leave out one of the two")
    if any(name.startswith("hugepages-") for name in job.resources) and not (job.memory or job.cpus_per_task):
        raise UsageError("Kubernetes accepts huge pages only with a limit on memory or CPUs", "--mem SIZE")


def _find_restricted_violation(job: PodJob) -> str | None:
    """Return what the Pod Security Standard "restricted" forbids in this job; None if nothing."""
    if job.host_network:
        return "the nodes' own network (--host-network)"
    if job.user and job.user[0] == 0:
        return "root (--run-as 0)"
    if resource := find_rdma_resource(job):
        return f"locked memory, which RDMA needs (--resource {resource})"
    folder = next((mount.source for mount in job.mounts if mount.source.startswith("/")), None)
    return f"folders of the nodes (--container-mounts {folder})" if folder else None


def _ports(ctx: click.Context) -> tuple[int, ...]:
    """Return the ports on which node 0 listens: that of torch's store, and the control port."""
    store = ctx.params["master_port"] or DEFAULT_PORT
    return (store, ctx.params["control_port"] or store + 1)


def _pod_groups(ctx: click.Context, target: str, nodes: int, *, is_elastic: bool) -> tuple[PodGroup, ...]:
    """Return the groups of pods of a job whose programs need other GPUs or images than its ranks; () if all are equal.

    Raises UsageError if the programs need another number of nodes, or one with --program-image has no nodes of its own.
    """
    params = ctx.params
    images = values.parse_key_values(params["program_images"])
    node_groups = batch_command.group_program_nodes(ctx, target, nodes, params["gpus_per_node"])
    if images and not node_groups:
        what = f"--program-image {params['program_images'][0]} is for a job of several programs"
        raise UsageError(what, "--container-image alone is the image of all pods")
    if not node_groups:
        return ()
    own = [each.program for each in node_groups[1:]]
    if wrong := next((name for name in images if name not in own), None):
        what = f"--program-image {wrong}={images[wrong]}: no program with nodes of its own is called {wrong}"
        near = closest_match(wrong, own)
        raise UsageError(what, f"did you mean {near}?" if near else f"such programs: {', '.join(own) or 'none'}")
    is_given = ctx.get_parameter_source("kind") is not ParameterSource.DEFAULT
    have_one_shape = len({each.gpus for each in node_groups}) == 1 and not images
    if have_one_shape and not (is_given and params["kind"] == JOBSET and own):
        return ()
    if is_given and params["kind"] != JOBSET:
        if images:
            what = f"--kind {params['kind']} has one image for all pods, so --program-image does not work with it"
            raise UsageError(what, "--kind jobset")
        return ()
    if is_elastic:
        what = f"--nodes {params['nodes']} does not work with nodes of {own[0]}"
        raise UsageError(what, "--nodes N, with a fixed number")
    if params["gang"] == VOLCANO:
        what = f"--gang {VOLCANO} does not start all pods of a JobSet together that has several Jobs"
        raise UsageError(what, f"--gang {COSCHEDULING}, or --kind job for pods of one shape")
    firsts = accumulate((each.nodes for each in node_groups), initial=0)
    names = [derive_job_name(each.program, MAX_DNS_LABEL) for each in node_groups]
    if len({*names}) < len(names):
        what = f"names of programs are equal in small letters: {', '.join(each.program for each in node_groups)}"
        raise UsageError(what, "rename one of them")
    return tuple(
        PodGroup(name, first, each.nodes, each.gpus, images.get(each.program, params["image"]))
        for name, first, each in zip(names, firsts, node_groups, strict=False)
    )


def _job_name(ctx: click.Context, target: str, nodes: int, groups: Sequence[PodGroup]) -> str:
    params = ctx.params
    name, unique = params["job_name"], params["unique_name"]
    suffix = f"-{''.join(random.choices(_NAME_LETTERS, k=SUFFIX_LENGTH - 1))}" if unique else ""
    longest = max_name_length(nodes, JOBSET if groups else params["kind"], groups) - len(suffix)
    if name is None:
        return derive_job_name(target, longest) + suffix
    if not NAME.fullmatch(name) or len(name) > longest:
        rule = f"expected small letters, digits and dashes, a letter first, at most {longest}"
        raise invalid_value_error(ctx, JOB_NAME, name, rule, f"--job-name {derive_job_name(name, longest)}")
    return f"{name}{suffix}"
