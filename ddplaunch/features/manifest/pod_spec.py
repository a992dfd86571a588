"""Builds the pod spec of a job: one container that runs ``ddplaunch run``.

The fields are those of kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from ddplaunch.cli import LAUNCHER_COMMENT, launcher_command
from ddplaunch.features.manifest.pod_job import CONTAINER, JOB, PYTORCHJOB, TRAINJOB, Mount, PodJob
from ddplaunch.features.manifest.yaml_writer import drop_empty, with_comment
from ddplaunch.system.clusters.systems.indexed_tasks import (
    ADDRESS_VARIABLE,
    FIRST_NODE_VARIABLE,
    INDEX_VARIABLE,
    NNODES_VARIABLE,
    PORT_VARIABLE,
)
from ddplaunch.system.code_version import CODE_VARIABLE
from ddplaunch.system.plan.rendezvous import DEFAULT_PORT

EXIT_MARGIN_S = 10  # after the grace, for the launcher to end leftover processes and print its report
NVIDIA = "nvidia.com/gpu"
REQUESTS_COMMENT = "The requests equal the limits, unless set."
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

_KUBEFLOW = (TRAINJOB, PYTORCHJOB)  # their controllers set the variables for node rank and number of nodes

_RDMA_PATTERN = re.compile(r"(^|[/._-])(rdma|hca|infiniband|roce|efa|mlnx)", re.IGNORECASE)
"""Names of RDMA network cards, which need locked memory: rdma/hca_shared_devices_a, …/efa, …"""


def pod_spec(job: PodJob) -> dict[str, Any]:
    """Return the spec of the job's pods, with comments."""
    checkpoint = f"Ranks have {job.preempt_grace:g} s for a checkpoint. " if job.preempt_grace else ""
    grace = f"{checkpoint}The grace of ranks is {job.grace:g} s; the rest is for cleaning up."
    grace_s = math.ceil(job.preempt_grace + job.grace) + EXIT_MARGIN_S
    token = with_comment("automountServiceAccountToken", "The pods do not use the Kubernetes API.")
    return drop_empty(
        {
            "restartPolicy": "Never",
            "subdomain": job.name if job.nodes > 1 and job.kind == JOB else None,  # a JobSet sets it itself
            with_comment("terminationGracePeriodSeconds", grace): grace_s,
            **_placement(job),
            "serviceAccountName": job.service_account,
            token: None if job.service_account else False,
            "securityContext": _security_context(job),
            "imagePullSecrets": [{"name": name} for name in job.pull_secrets],
            "containers": [_container(job)],
            "volumes": list(_volumes(job)),
        }
    )


def _placement(job: PodJob) -> dict[str, Any]:
    """Return the fields that decide where pods run."""
    selector = {"matchLabels": job.pod_selector}
    labels: dict[str, str] = {}
    rules: list[dict[str, Any]] = []
    for text in job.constraint:
        key, _, value = text.partition("=")
        if key.endswith("!"):
            rules.append({"key": key[:-1], "operator": "NotIn", "values": value.split("|")})
        elif "|" in value:
            rules.append({"key": key, "operator": "In", "values": value.split("|")})
        else:
            labels[key] = value
    node_affinity = {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": rules}]}} if rules else None
    anti_affinity = [{"labelSelector": selector, "topologyKey": key} for key in job.anti_affinity_labels]
    evenly = {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector}
    dns = with_comment("dnsPolicy", "Otherwise the name of node 0 would not be known there.")
    pod_affinity = {_REQUIRED: anti_affinity} if anti_affinity else None
    return {
        "schedulerName": job.scheduler_name,
        "priorityClassName": job.priority_class,
        "nodeSelector": labels,
        "affinity": drop_empty({"nodeAffinity": node_affinity, "podAntiAffinity": pod_affinity}),
        "topologySpreadConstraints": [{"topologyKey": key, **evenly} for key in job.spread],
        "tolerations": [_toleration(each) for each in job.tolerations],
        "hostNetwork": job.host_network or None,
        dns: "ClusterFirstWithHostNet" if job.host_network else None,
    }


def _security_context(job: PodJob) -> dict[str, Any]:
    """Return the security context: user, group, seccomp profile."""
    user, group = job.user or (None, None)
    return drop_empty(
        {
            "runAsNonRoot": job.restricted or None,
            "seccompProfile": {"type": "RuntimeDefault"} if job.restricted else None,
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": group,
        }
    )


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    how = "Equal" if equals else "Exists"
    return drop_empty({"key": key, "operator": how, "value": value or None, "effect": effect or None})


def _container(job: PodJob) -> dict[str, Any]:
    index = f"which is added to {FIRST_NODE_VARIABLE}" if job.group else "the node rank"
    env, cluster = with_comment("env", f"Kubernetes adds {INDEX_VARIABLE}, {index}."), "kubernetes"
    if job.kind in _KUBEFLOW:
        env, cluster = "env", "kubeflow"
    ports = with_comment("ports", "Node 0 listens there, so no machine gets two pods with these ports.")
    message = with_comment("terminationMessagePolicy", "kubectl describe pod shows the report of a failure.")
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": "tmp", "mountPath": "/tmp"}] if _needs_tmp_volume(job) else []
    for name, mount in _named_mounts(job):
        mounts.append(drop_empty({"name": name, "mountPath": mount.path, "readOnly": mount.read_only or None}))
    mounts += job.code.mounts if job.code else ()
    return drop_empty(
        {
            "name": CONTAINER,
            "image": job.group.image if job.group else job.image,
            "imagePullPolicy": job.pull,
            with_comment("command", LAUNCHER_COMMENT): _launcher_words(job, cluster),
            "args": [_escape_expansion(word) for word in job.command],
            env: _variables(job),
            "envFrom": [{"secretRef": {"name": name}} for name in job.env_from_secrets],
            ports: [{"containerPort": port, "hostPort": port} for port in job.host_ports],
            **_resources(job),
            message: "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }
    )


def _launcher_words(job: PodJob, cluster: str) -> list[str]:
    """Return the words that start the launcher, before its options; with --code a shell unpacks the code first."""
    words = [*launcher_command("python"), "run", "--cluster", cluster]
    if job.code is None:
        return words
    return ["/bin/sh", "-c", _escape_expansion(f'{job.code.command} && exec "$@"'), "sh", *words]


def _resources(job: PodJob) -> dict[str, Any]:
    gpus = job.group.gpus if job.group else job.gpus_per_node
    amounts = {"cpu": job.cpus_per_task, "memory": job.memory, NVIDIA: gpus or None}
    limits = drop_empty({**amounts, **job.resources})
    resources = with_comment("resources", REQUESTS_COMMENT) if limits else "resources"
    fields = {resources: drop_empty({"limits": limits, "requests": dict(job.requests)})}
    if job.restricted:
        fields["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    elif find_rdma_resource(job):
        context = with_comment("securityContext", "RDMA needs memory that is never swapped: locked memory.")
        fields[context] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return fields


def find_rdma_resource(job: PodJob) -> str | None:
    """Return the resource for which the container needs locked memory; None if there is none."""
    return next(filter(_RDMA_PATTERN.search, job.resources), None)


def _needs_tmp_volume(job: PodJob) -> bool:
    return job.restricted and all(mount.path.rstrip("/") != "/tmp" for mount in job.mounts)


def _variables(job: PodJob) -> list[dict[str, Any]]:
    rank_variables: dict[str, str] = {}
    if job.kind not in _KUBEFLOW:
        rank_variables[NNODES_VARIABLE] = f"{job.min_nodes}:{job.nodes}" if job.min_nodes else str(job.nodes)
        if job.nodes > 1:
            rank_variables |= {ADDRESS_VARIABLE: job.node_zero_dns_name, PORT_VARIABLE: str(DEFAULT_PORT)}
        if job.group:
            rank_variables[FIRST_NODE_VARIABLE] = str(job.group.first_node)
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, secret, key in (re.split("[=:]", each) for each in job.secrets if "=" in each)
    ]
    home = {"HOME": "/tmp"} if job.user else {}  # a user that the image does not know has no home
    code = {CODE_VARIABLE: job.code.version.to_variable()} if job.code else {}
    plain = {**home, **job.variables, **code, **rank_variables}
    return [*secret, *({"name": name, "value": _escape_expansion(value)} for name, value in plain.items())]


def _escape_expansion(text: str) -> str:
    """Escape a word for Kubernetes, which expands ``$(NAME)`` and reads ``$$`` as ``$``."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _volumes(job: PodJob) -> Iterator[Any]:
    size = {"sizeLimit": job.shm} if job.shm else {}
    why = "DataLoader workers pass batches through it; the default is 64 MB. It counts as memory."
    yield {with_comment("name", why): "shm", "emptyDir": {"medium": "Memory", **size}}
    if _needs_tmp_volume(job):
        yield {"name": "tmp", "emptyDir": {}}
    for name, mount in _named_mounts(job):
        yield {"name": name, **_source(mount)}
    yield from job.code.volumes if job.code else ()


def _source(mount: Mount) -> dict[str, Any]:
    if mount.source.startswith("/"):
        return {"hostPath": {"path": mount.source}}
    kind, _, what = mount.source.partition("/")
    if kind == "emptydir":
        return {"emptyDir": {"sizeLimit": what} if what else {}}
    if what:
        return {"configMap": {"name": what}} if kind == "configmap" else {"secret": {"secretName": what}}
    return {"persistentVolumeClaim": {"claimName": mount.source}}


def _named_mounts(job: PodJob) -> Iterator[tuple[str, Mount]]:
    return ((f"mount-{number}", mount) for number, mount in enumerate(job.mounts, 1))
