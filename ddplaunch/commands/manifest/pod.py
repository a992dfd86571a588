"""The pod of a job: one container that runs ``ddplaunch run``, with all that the job asks for.

The fields are those of kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from ddplaunch.clusters.systems.indexed import ADDRESS, INDEX, NNODES, PORT
from ddplaunch.commands.manifest.pod_job import JOB, TRAINJOB, Mount, PodJob, Toleration
from ddplaunch.commands.manifest.yaml import Noted
from ddplaunch.plan.command import python_command
from ddplaunch.plan.rendezvous import DEFAULT_PORT

CONTAINER = "ddplaunch"
AFTERWARDS = 10  # seconds after the grace in which a launcher ends what is left and prints its report
NVIDIA = "nvidia.com/gpu"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

_PINS = re.compile(r"(^|[/._-])(rdma|hca|infiniband|roce|efa|mlnx)", re.IGNORECASE)
"""Resources that are network cards which pages of memory are pinned for: rdma/hca_shared_devices_a, …/efa, …"""


def pod_spec(job: PodJob) -> dict[str, Any]:
    """The pods' spec, with comments."""
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if job.nodes > 1 and job.kind == JOB:  # a JobSet sets it itself
        spec["subdomain"] = job.name
    checkpoint = f"Ranks have {job.preempt_grace:g} s for a checkpoint. " if job.preempt_grace else ""
    spec["terminationGracePeriodSeconds"] = Noted(
        f"{checkpoint}The grace of ranks is {job.grace:g} s; the rest is for ending what they leave.",
        math.ceil(job.preempt_grace + job.grace) + AFTERWARDS,
    )
    spec |= _place(job)
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    else:
        spec["automountServiceAccountToken"] = Noted("Nothing in the pods speaks to Kubernetes.", False)
    spec |= _identity(job)
    if job.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in job.pull_secrets]
    return {**spec, "containers": [_container(job)], "volumes": list(_volumes(job))}


def _place(job: PodJob) -> dict[str, Any]:
    """Where the pods may run, and who decides."""
    spec: dict[str, Any] = {}
    if job.scheduler_name:
        spec["schedulerName"] = job.scheduler_name
    if job.priority_class:
        spec["priorityClassName"] = job.priority_class
    if job.node_labels:
        spec["nodeSelector"] = dict(job.node_labels)
    ours = {"matchLabels": job.own_pods}
    affinity: dict[str, Any] = {}
    if job.node_rules:
        rules = [{"key": each.key, "operator": each.operator, "values": list(each.values)} for each in job.node_rules]
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": rules}]}}
    if job.apart:
        affinity["podAntiAffinity"] = {_REQUIRED: [{"labelSelector": ours, "topologyKey": key} for key in job.apart]}
    if affinity:
        spec["affinity"] = affinity
    if job.spread:
        evenly = {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": ours}
        spec["topologySpreadConstraints"] = [{"topologyKey": key, **evenly} for key in job.spread]
    if job.tolerations:
        spec["tolerations"] = [_toleration(each) for each in job.tolerations]
    if job.host_network:
        spec["hostNetwork"] = True
        spec["dnsPolicy"] = Noted("Otherwise the name of node 0 would not be known there.", "ClusterFirstWithHostNet")
    return spec


def _identity(job: PodJob) -> dict[str, Any]:
    """Whose the processes are, and what the kernel lets them do."""
    context: dict[str, Any] = {}
    if job.restricted:
        context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if job.user:
        user, group = job.user
        context |= {"runAsUser": user, "runAsGroup": group, "fsGroup": group}
    return {"securityContext": context} if context else {}


def _toleration(each: Toleration) -> dict[str, str]:
    how = {"operator": "Exists"} if each.value is None else {"operator": "Equal", "value": each.value}
    return {"key": each.key, **how, **({"effect": each.effect} if each.effect else {})}


def _container(job: PodJob) -> dict[str, Any]:
    cluster = "kubeflow" if job.kind == TRAINJOB else "kubernetes"
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        **({"imagePullPolicy": job.pull} if job.pull else {}),
        "command": [*python_command("python"), "run", "--cluster", cluster],
        "args": [_unexpanded(word) for word in job.command],
        "env": _variables(job)
        if job.kind == TRAINJOB
        else Noted(f"Kubernetes adds {INDEX}, the node rank.", _variables(job)),
    }
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    if job.host_ports:
        container["ports"] = Noted(
            "Node 0 listens there, so no machine gets two pods with these ports.",
            [{"containerPort": port, "hostPort": port} for port in job.host_ports],
        )
    container |= _resources(job)
    return {
        **container,
        "terminationMessagePolicy": Noted(
            "kubectl describe pod shows the report of a failure.", "FallbackToLogsOnError"
        ),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *([{"name": "tmp", "mountPath": "/tmp"}] if _has_tmp(job) else []),
            *(
                {"name": name, "mountPath": mount.path, **({"readOnly": True} if mount.read_only else {})}
                for name, mount in _named(job)
            ),
        ],
    }


def _resources(job: PodJob) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if job.cpus is not None:
        limits["cpu"] = job.cpus
    if job.memory is not None:
        limits["memory"] = job.memory
    if job.gpus:
        limits[NVIDIA] = job.gpus
    limits |= job.resources
    both = {"limits": limits} if limits else {}
    fields: dict[str, Any] = {}
    if both or job.requests:
        both |= {"requests": dict(job.requests)} if job.requests else {}
        fields["resources"] = Noted("As much is requested, where nothing else is.", both) if limits else both
    if job.restricted:
        fields["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    elif pins(job):
        capability = {"capabilities": {"add": ["IPC_LOCK"]}}
        fields["securityContext"] = Noted("RDMA needs memory that is never swapped: locked memory.", capability)
    return fields


def pins(job: PodJob) -> bool:
    """Whether the container needs locked memory, for RDMA."""
    return any(map(_PINS.search, job.resources))


def _has_tmp(job: PodJob) -> bool:
    return job.restricted and all(mount.path.rstrip("/") != "/tmp" for mount in job.mounts)


def _variables(job: PodJob) -> list[dict[str, Any]]:
    place = {NNODES: f"{job.min_nodes}:{job.nodes}" if job.min_nodes else str(job.nodes)}
    if job.nodes > 1:
        place |= {ADDRESS: job.node_zero, PORT: str(DEFAULT_PORT)}
    if job.kind == TRAINJOB:  # its runtime tells all of it
        place = {}
    secret = [
        {"name": each.name, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}
        for each in job.secret_variables
    ]
    home = {"HOME": "/tmp"} if job.user else {}  # a user that the image does not know has none
    plain = {**home, **job.variables, **place}
    return [*secret, *({"name": name, "value": _unexpanded(value)} for name, value in plain.items())]


def _unexpanded(text: str) -> str:
    """Write a word so that Kubernetes leaves it alone: it would replace ``$(NAME)``, and reads ``$$`` as ``$``."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _volumes(job: PodJob) -> Iterator[Any]:
    size = {"sizeLimit": job.shm} if job.shm else {}
    yield Noted(
        "DataLoader workers hand their batches over there, and a container has 64 MB. It counts as memory.",
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
    )
    if _has_tmp(job):
        yield {"name": "tmp", "emptyDir": {}}
    for name, mount in _named(job):
        yield {"name": name, **_source(mount)}


def _source(mount: Mount) -> dict[str, Any]:
    if mount.source.startswith("/"):
        return {"hostPath": {"path": mount.source}}
    kind, _, what = mount.source.partition("/")
    if kind == "emptydir":
        return {"emptyDir": {"sizeLimit": what} if what else {}}
    if what:
        return {"configMap": {"name": what}} if kind == "configmap" else {"secret": {"secretName": what}}
    return {"persistentVolumeClaim": {"claimName": mount.source}}


def _named(job: PodJob) -> Iterator[tuple[str, Mount]]:
    return ((f"mount-{number}", mount) for number, mount in enumerate(job.mounts, 1))
