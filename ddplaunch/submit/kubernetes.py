"""The manifest of a job for Kubernetes: a pure function, short enough to read before ``kubectl`` gets it.

It is an indexed Job, whose pods are the nodes, and the headless Service that gives each a name; it needs no operator.
In a pod ``ddplaunch run`` learns its node rank from the variables that ``clusters/kubernetes`` reads. The fields are
those of kubernetes.io/docs/reference/kubernetes-api; what we say about the Job controller is from its source,
pkg/controller/job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddplaunch.clusters.kubernetes import ADDRESS, INDEX, NNODES, PORT
from ddplaunch.dataclass import dataclass, field
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE
from ddplaunch.plan.command import python_command
from ddplaunch.plan.rendezvous import DEFAULT_PORT
from ddplaunch.submit import yaml
from ddplaunch.submit.yaml import Noted

OWN_VARIABLES = (INDEX, NNODES, ADDRESS, PORT)
"""The variables that tell a pod its node rank and node 0; Kubernetes sets the index, we set the others."""

LABEL = 63  # characters in a DNS label (RFC 1035); the name of every pod is one
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""The names that a Service may have; a Job's may also begin with a digit."""

AFTERWARDS = 10  # seconds after the grace in which a launcher ends what is left and prints its report
AGAIN = (EXIT_UNAVAILABLE, EXIT_PREEMPTED, EXIT_SIGNAL + 15)
"""The exit codes of launchers that ended because a pod, theirs or another's, was taken away."""

_CONTAINER = "ddplaunch"
_JOB_NAME = "batch.kubernetes.io/job-name"


@dataclass(frozen=True)
class Mount:
    """A folder in the container. ``source`` is an absolute path on the node, or the name of a PersistentVolumeClaim."""

    source: str
    path: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.path}{':ro' * self.read_only}"


@dataclass(frozen=True)
class PodJob:
    """What a job asks Kubernetes for, and what it runs; None asks for nothing."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    name: str  # of the Job and its Service, and the beginning of the pods' names; matches `NAME`
    image: str
    nodes: int = 1
    gpus: int = 0  # of each pod, as CPUs and memory
    cpus: int | None = None
    memory: str | None = None  # as Kubernetes writes it ("200Gi")
    seconds: int | None = None  # the time limit of the whole job, from its submission
    grace: float = 30.0  # seconds that ranks have between SIGTERM and SIGKILL
    preempt_grace: float = 0.0  # seconds before that for a checkpoint, if SIGTERM is the preemption signal
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    node_labels: Mapping[str, str] = field(default_factory=dict)  # labels that the nodes must have
    variables: Mapping[str, str] = field(default_factory=dict)  # of the container, beside `OWN_VARIABLES`
    mounts: Sequence[Mount] = ()


def longest_name(nodes: int) -> int:
    """Characters that the name of a job may have: its last pod is NAME-INDEX."""
    return LABEL - len(f"-{nodes - 1}")


def name_from(text: str, nodes: int) -> str:
    """Make a valid name for a job out of a target, or of a name that is not valid."""
    last = re.sub(r"\.py(?=:|$)", "", text.rpartition("/")[2].lower())
    name = re.sub(r"[^a-z0-9]+", "-", last).strip("-")
    if not NAME.match(name):
        name = f"job-{name}".rstrip("-")
    return name[: longest_name(nodes)].rstrip("-")


def manifest(job: PodJob) -> str:
    """Write the job as YAML for ``kubectl apply``. Raises UsageError if a string cannot stand in YAML."""
    head = "# Written by ddplaunch manifest, for Kubernetes 1.29 or newer. To submit it: kubectl apply -f THIS_FILE\n"
    return head + "---\n".join(yaml.document(each) for each in objects(job))


def objects(job: PodJob) -> Iterator[dict[str, Any]]:
    """The Service, unless the job has one node, and the Job; with comments."""
    metadata = {"name": job.name, **({"namespace": job.namespace} if job.namespace else {}), "labels": _labels(job)}
    if job.nodes > 1:
        yield {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": _service(job)}
    yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job(job)}


def _labels(job: PodJob) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "ddplaunch", **job.labels}


def _service(job: PodJob) -> dict[str, Any]:
    return {
        "clusterIP": Noted(f"Headless: it only gives the pods names. Node 0 is {_node_zero(job)}.", "None"),
        "publishNotReadyAddresses": Noted("The nodes look for node 0 before it is ready.", True),
        "selector": {_JOB_NAME: job.name},
    }


def _node_zero(job: PodJob) -> str:
    """The name of the Job's first pod, in the domain of the Service."""
    return f"{job.name}-0.{job.name}"


def _job(job: PodJob) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": Noted("A pod is a node: one ddplaunch, which starts the ranks there.", "Indexed"),
        "completions": job.nodes,
        "parallelism": job.nodes,
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = Noted("From now on: time in which pods wait counts too.", job.seconds)
    return {
        **spec,
        "podFailurePolicy": Noted(
            "All pods end together. Where one was taken away all are started again, after 10 s, then 20 s, …;\n"
            "where the program failed the job has failed.",
            {"rules": _rules()},
        ),
        # By index, since retries of the whole are delayed for 10 s times 2 to the number of failed pods. The counts are
        # for pods without an exit code, say those that a machine refused: one that is given up has to end the others.
        "backoffLimitPerIndex": Noted("A pod that could not even begin is tried again, three times.", 3),
        "maxFailedIndexes": 0,
        "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job)},
    }


def _rules() -> list[Any]:
    """The first rule that fits a failed pod decides.

    A pod that was taken away may have an exit code too, so its condition comes first. It is the same for preemption,
    eviction and lost machines.
    """
    codes = {"containerName": _CONTAINER, "values": list(AGAIN)}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        Noted(
            f"{EXIT_UNAVAILABLE}: a node was lost or never came. {EXIT_PREEMPTED}: preempted. "
            f"{EXIT_SIGNAL + 15}: SIGTERM.",
            {"action": "Ignore", "onExitCodes": {"operator": "In", **codes}},
        ),
        {"action": "FailJob", "onExitCodes": {"operator": "NotIn", **codes}},
    ]


def _pod(job: PodJob) -> dict[str, Any]:
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if job.nodes > 1:
        spec["subdomain"] = job.name
    checkpoint = f"Ranks have {job.preempt_grace:g} s for a checkpoint. " if job.preempt_grace else ""
    spec["terminationGracePeriodSeconds"] = Noted(
        f"{checkpoint}The grace of ranks is {job.grace:g} s; the rest is for ending what they leave.",
        math.ceil(job.preempt_grace + job.grace) + AFTERWARDS,
    )
    if job.node_labels:
        spec["nodeSelector"] = dict(job.node_labels)
    return {**spec, "containers": [_container(job)], "volumes": list(_volumes(job))}


def _container(job: PodJob) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if job.cpus is not None:
        limits["cpu"] = job.cpus
    if job.memory is not None:
        limits["memory"] = job.memory
    if job.gpus:
        limits["nvidia.com/gpu"] = job.gpus
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": job.image,
        "command": [*python_command("python"), "run", "--cluster", "kubernetes"],
        "args": [_unexpanded(word) for word in job.command],
        "env": Noted(f"Kubernetes adds {INDEX}, the node rank.", _variables(job)),
    }
    if limits:
        container["resources"] = Noted("As much is requested, where nothing else is.", {"limits": limits})
    return {
        **container,
        "terminationMessagePolicy": Noted(
            "kubectl describe pod shows the report of a failure.", "FallbackToLogsOnError"
        ),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": name, "mountPath": mount.path, **({"readOnly": True} if mount.read_only else {})}
                for name, mount in _named(job)
            ),
        ],
    }


def _variables(job: PodJob) -> list[dict[str, str]]:
    place = {NNODES: str(job.nodes)}
    if job.nodes > 1:
        place |= {ADDRESS: _node_zero(job), PORT: str(DEFAULT_PORT)}
    return [{"name": name, "value": _unexpanded(value)} for name, value in {**job.variables, **place}.items()]


def _unexpanded(text: str) -> str:
    """Write a word so that Kubernetes leaves it alone: it would replace ``$(NAME)``, and reads ``$$`` as ``$``."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _volumes(job: PodJob) -> Iterator[Any]:
    yield Noted(
        "DataLoader workers hand their batches over there, and a container has 64 MB. It counts as memory.",
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    )
    for name, mount in _named(job):
        if mount.source.startswith("/"):
            yield {"name": name, "hostPath": {"path": mount.source}}
        else:
            yield {"name": name, "persistentVolumeClaim": {"claimName": mount.source}}


def _named(job: PodJob) -> Iterator[tuple[str, Mount]]:
    return ((f"mount-{number}", mount) for number, mount in enumerate(job.mounts, 1))
