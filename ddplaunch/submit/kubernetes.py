"""The manifest of a Kubernetes job: a pure function of a request, short enough to read before ``kubectl`` gets it.

An indexed Job, whose pods are the nodes, and the headless Service that gives each a name; no operator is needed. In a
pod ``ddplaunch run`` finds its place by the variables that ``clusters/kubernetes`` reads. The fields are those of
kubernetes.io/docs/reference/kubernetes-api; what is said of the Job controller is from its source, pkg/controller/job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddplaunch.clusters.kubernetes import ADDRESS, INDEX, NNODES, PORT
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE
from ddplaunch.plan.command import python_command
from ddplaunch.plan.rendezvous import DEFAULT_PORT
from ddplaunch.submit import yaml
from ddplaunch.submit.yaml import Noted

OWN_VARIABLES = (INDEX, NNODES, ADDRESS, PORT)
"""What tells a pod its place; all but the index, which Kubernetes adds, are set here."""

LABEL = 63
"""Letters in a DNS label, which the name of every pod has to be (RFC 1035)."""

NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""The names of a Service; those of a Job may begin with a digit too."""

AFTERWARDS = 10
"""Seconds behind the grace in which a launcher ends what is left, and says why."""

AGAIN = (EXIT_UNAVAILABLE, EXIT_PREEMPTED, EXIT_SIGNAL + 15)
"""The exit codes of launchers that ended because a pod was taken away, theirs or another's."""

_CONTAINER = "ddplaunch"
_JOB_NAME = "batch.kubernetes.io/job-name"


@dataclass(frozen=True)
class Mount:
    """A folder in the container: of the machine, by its absolute path, or a PersistentVolumeClaim, by its name."""

    source: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Request:
    """What a job asks of Kubernetes and what it runs; None where nothing is to be asked.

    Attributes:
        command: the words behind ``ddplaunch run``: its options, the target and the target's arguments.
        name: of the Job and its Service, and the beginning of the pods'; as ``check`` of them wants it.
        gpus, cpus, memory: what each pod has for itself; memory as Kubernetes has it ("200Gi").
        seconds: the limit of the whole job, from its submission.
        grace: what ranks have between SIGTERM and SIGKILL, in seconds.
        preempt_grace: what they have before that for a checkpoint, where SIGTERM is the launcher's warning.
        node_labels: labels that the machines must have.
        variables: for the container, beside ``OWN_VARIABLES``.
    """

    command: Sequence[str]
    name: str
    image: str
    nodes: int = 1
    gpus: int = 0
    cpus: int | None = None
    memory: str | None = None
    seconds: int | None = None
    grace: float = 30.0
    preempt_grace: float = 0.0
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    node_labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()


def longest_name(nodes: int) -> int:
    """How long the name of a job may be: its last pod's is NAME-INDEX."""
    return LABEL - len(f"-{nodes - 1}")


def name_from(text: str, nodes: int) -> str:
    """Make a name of a job that is like ``text``: a target, or a name that is none."""
    last = re.sub(r"\.py(?=:|$)", "", text.rpartition("/")[2].lower())
    name = re.sub(r"[^a-z0-9]+", "-", last).strip("-")
    if not NAME.match(name):
        name = f"job-{name}".rstrip("-")
    return name[: longest_name(nodes)].rstrip("-")


def manifest(request: Request) -> str:
    """Write the job as YAML for ``kubectl apply``.

    Raises:
        UsageError: a string cannot stand in YAML.
    """
    head = "# Written by ddplaunch submit, for Kubernetes 1.29 or newer. To submit it: kubectl apply -f THIS_FILE\n"
    return head + "---\n".join(yaml.document(each) for each in objects(request))


def objects(request: Request) -> Iterator[dict[str, Any]]:
    """The Service, which a job of one node does not need, and the Job; with comments."""
    metadata = {
        "name": request.name,
        **({"namespace": request.namespace} if request.namespace else {}),
        "labels": _labels(request),
    }
    if request.nodes > 1:
        yield {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": _service(request)}
    yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job(request)}


def _labels(request: Request) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "ddplaunch", **request.labels}


def _service(request: Request) -> dict[str, Any]:
    return {
        "clusterIP": Noted(f"Headless: it only gives the pods names. Node 0 is {_node_zero(request)}.", "None"),
        "publishNotReadyAddresses": Noted("The nodes look for node 0 before it is ready.", True),
        "selector": {_JOB_NAME: request.name},
    }


def _node_zero(request: Request) -> str:
    """The Job's hostname for its first pod, in the domain that the Service makes."""
    return f"{request.name}-0.{request.name}"


def _job(request: Request) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": Noted("A pod is a node: one ddplaunch, which starts the ranks there.", "Indexed"),
        "completions": request.nodes,
        "parallelism": request.nodes,
    }
    if request.seconds is not None:
        spec["activeDeadlineSeconds"] = Noted("From now on: time in which pods wait counts too.", request.seconds)
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
        "template": {"metadata": {"labels": _labels(request)}, "spec": _pod(request)},
    }


def _rules() -> list[Any]:
    """The first that fits a failed pod decides. A pod taken away may well have an exit code, so its condition is first.

    The condition is that of preemption, eviction and lost machines alike; other pods have only our exit code.
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


def _pod(request: Request) -> dict[str, Any]:
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if request.nodes > 1:
        spec["subdomain"] = request.name
    checkpoint = f"Ranks have {request.preempt_grace:g} s for a checkpoint. " if request.preempt_grace else ""
    spec["terminationGracePeriodSeconds"] = Noted(
        f"{checkpoint}The grace of ranks is {request.grace:g} s; the rest is for ending what they leave.",
        math.ceil(request.preempt_grace + request.grace) + AFTERWARDS,
    )
    if request.node_labels:
        spec["nodeSelector"] = dict(request.node_labels)
    return {**spec, "containers": [_container(request)], "volumes": list(_volumes(request))}


def _container(request: Request) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if request.cpus is not None:
        limits["cpu"] = request.cpus
    if request.memory is not None:
        limits["memory"] = request.memory
    if request.gpus:
        limits["nvidia.com/gpu"] = request.gpus
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": request.image,
        "command": [*python_command("python"), "run", "--cluster", "kubernetes"],
        "args": [_unexpanded(word) for word in request.command],
        "env": Noted(f"Kubernetes adds {INDEX}, the node rank.", _variables(request)),
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
                for name, mount in _named(request)
            ),
        ],
    }


def _variables(request: Request) -> list[dict[str, str]]:
    place = {NNODES: str(request.nodes)}
    if request.nodes > 1:
        place |= {ADDRESS: _node_zero(request), PORT: str(DEFAULT_PORT)}
    return [{"name": name, "value": _unexpanded(value)} for name, value in {**request.variables, **place}.items()]


def _unexpanded(text: str) -> str:
    """Write a word so that Kubernetes reads it as it is: ``$(NAME)`` would be a variable, and ``$$`` is one ``$``."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _volumes(request: Request) -> Iterator[Any]:
    yield Noted(
        "DataLoader workers hand their batches over there, and a container has 64 MB. It counts as memory.",
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    )
    for name, mount in _named(request):
        if mount.source.startswith("/"):
            yield {"name": name, "hostPath": {"path": mount.source}}
        else:
            yield {"name": name, "persistentVolumeClaim": {"claimName": mount.source}}


def _named(request: Request) -> Iterator[tuple[str, Mount]]:
    return ((f"mount-{number}", mount) for number, mount in enumerate(request.mounts, 1))
