"""The settings of a Kubernetes job: checked by the command, input of the manifest."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.features.code.config_maps import CodeVolume
from ddplaunch.system.clusters.systems.indexed_tasks import (
    ADDRESS_VARIABLE,
    FIRST_NODE_VARIABLE,
    INDEX_VARIABLE,
    NNODES_VARIABLE,
    PORT_VARIABLE,
)

OWN_VARIABLES = (INDEX_VARIABLE, FIRST_NODE_VARIABLE, NNODES_VARIABLE, ADDRESS_VARIABLE, PORT_VARIABLE)
"""Variables for node rank, number of nodes and node 0; Kubernetes sets the index, the manifest the others."""

FIRST_NODE = "ddplaunch-first-node"  # an annotation of the pods of a PodGroup: the node rank of its first pod

JOB, JOBSET, TRAINJOB, PYTORCHJOB = "job", "jobset", "trainjob", "pytorchjob"
JOB_NAME = "batch.kubernetes.io/job-name"  # a label of a Job's pods
CONTAINER = "ddplaunch"  # the container of a pod
NODE = "node"  # the one replicated Job of a JobSet, whose pods are the nodes; also that of Kubeflow's runtimes

VOLCANO, COSCHEDULING = "volcano", "coscheduling"
SCHEDULERS = {VOLCANO: "volcano", COSCHEDULING: "scheduler-plugins-scheduler"}
"""The schedulers of --gang, and their schedulerName as installed by their Helm charts."""

PULL_POLICIES = {each.lower(): each for each in ("Always", "IfNotPresent", "Never")}
"""Values of imagePullPolicy, by lower-case text."""

MAX_DNS_LABEL = 63  # characters in a DNS label (RFC 1035); each pod name is one
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""Valid names of a Service; those of a Job may also start with a digit."""


class Mount(Struct, frozen=True):
    """A volume mounted in the container.

    ``source`` is an absolute path on the node, the name of a PersistentVolumeClaim, configmap/NAME, secret/NAME,
    emptydir, or emptydir/SIZE as Kubernetes writes sizes.
    """

    source: str
    path: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.path}{':ro' * self.read_only}"


class PodGroup(Struct, frozen=True):
    """A group of equal pods in a JobSet with several groups: the nodes with ranks, or the nodes of one program."""

    name: str  # of its replicated Job; matches `NAME`
    first_node: int  # the node rank of its first pod
    pods: int
    gpus: int  # of each pod
    image: str


class PodJob(Struct, frozen=True):
    """A Kubernetes job: its resources and what it runs; a field that is None is not set."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    name: str  # of the Job and its Service, and the beginning of the pods' names; matches `NAME`
    image: str
    nodes: int
    min_nodes: int | None  # of an elastic job; None if it needs all nodes
    gpus_per_node: int
    cpus_per_task: int | None  # of each pod
    memory: str | None  # of each pod, as Kubernetes writes it ("200Gi"), like all sizes here
    resources: Mapping[str, str | int]  # other resources of each pod: {"rdma/hca": 8}
    requests: Mapping[str, str | int]  # resource requests of each pod that differ from its limits
    shm: str | None  # size of /dev/shm; None is the pod's memory
    seconds: int | None  # the time limit of the whole job, from its submission
    grace: float  # seconds that ranks have between SIGTERM and SIGKILL
    preempt_grace: float  # seconds for a checkpoint before the grace, if SIGTERM is the preemption signal
    retries: int | None  # how often all pods may be started again; None: after each disruption
    ttl_s: int | None  # seconds until the finished job is deleted; None: never
    kind: str  # JOB, JOBSET, TRAINJOB or PYTORCHJOB
    runtime: str | None  # of a TrainJob: the name of its ClusterTrainingRuntime; None is Kubeflow's own
    namespace: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    constraint: Sequence[str]  # labels of nodes: KEY=VALUE, KEY=A|B or KEY!=A|B
    tolerations: Sequence[str]  # KEY[=VALUE][:EFFECT]
    spread: Sequence[str]  # node labels over whose values pods are spread
    anti_affinity_labels: Sequence[str]  # node labels; no two pods run at the same value
    priority_class: str | None
    gang: str | None  # VOLCANO or COSCHEDULING
    scheduler: str | None  # schedulerName; None: Kubernetes' own, or that of the gang
    host_network: bool  # whether pods use the network of their machines
    host_ports: tuple[int, ...]  # ports of node 0 on the network of its machine
    service_account: str | None
    restricted: bool  # whether the pods meet the Pod Security Standard "restricted"
    user: tuple[int, int] | None  # the numbers of the pods' user and group; None for the image's
    pull: str | None  # of ``PULL_POLICIES``
    pull_secrets: Sequence[str]
    variables: Mapping[str, str]  # of the container, besides `OWN_VARIABLES`
    secrets: Sequence[str]  # NAME=SECRET:KEY: one variable; SECRET: a variable for each of its keys
    mounts: Sequence[Mount]
    code: CodeVolume | None = None  # None: the image has the code
    groups: Sequence[PodGroup] = ()  # of a JobSet whose pods differ
    group: PodGroup | None = None  # the group whose pods are being built; None without groups

    @property
    def node_zero_dns_name(self) -> str:
        """The DNS name of the first pod, which the job's Service provides."""
        return f"{_pod_prefix(self.name, self.kind, self.groups)}0.{self.name}"

    @property
    def pod_selector(self) -> dict[str, str]:
        """The label, set by the controller, that selects the pods of this job."""
        labels = {JOB: JOB_NAME, PYTORCHJOB: "training.kubeflow.org/job-name"}
        return {labels.get(self.kind, "jobset.sigs.k8s.io/jobset-name"): self.name}

    @property
    def required_nodes(self) -> int:
        """The smallest number of nodes with which the job runs."""
        return self.min_nodes or self.nodes

    @property
    def env_from_secrets(self) -> list[str]:
        return [each for each in self.secrets if "=" not in each]

    @property
    def scheduler_name(self) -> str | None:
        return self.scheduler or (SCHEDULERS[self.gang] if self.gang else None)


def refuse_options(job: PodJob, options: Mapping[str, str], why: str, hint: str) -> None:
    """Raise UsageError if the job sets a field that its kind does not support; ``options``: option names by field."""
    for name, option in options.items():
        if (value := getattr(job, name)) or (name == "retries" and value == 0):
            raise UsageError(f"{option} does not work with --kind {job.kind}: {why}", hint)


def _pod_prefix(name: str, kind: str, groups: Sequence[PodGroup] = ()) -> str:
    """Return the prefix of pod names before the index; of a job with several groups, the prefix of the first group."""
    replicated = f"{groups[0].name if groups else NODE}-0-"
    return f"{name}-{ {JOB: '', PYTORCHJOB: 'worker-'}.get(kind, replicated) }"


def max_name_length(nodes: int, kind: str = JOB, groups: Sequence[PodGroup] = ()) -> int:
    """Return the maximum length of a job name: its last pod's name, like NAME-node-0-INDEX, must be a DNS label."""
    prefixes = [_pod_prefix("", kind, [each]) for each in groups] or [_pod_prefix("", kind)]
    return MAX_DNS_LABEL - max(len(f"{prefix}{nodes - 1}") for prefix in prefixes)


def derive_job_name(text: str, longest: int) -> str:
    """Derive a valid job name from a target or an invalid name."""
    last = re.sub(r"\.py(?=:|$)", "", text.rpartition("/")[2].lower())
    without_accents = unicodedata.normalize("NFKD", last).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9]+", "-", without_accents).strip("-")
    if not NAME.match(name):
        name = f"job-{name}".rstrip("-")
    return name[:longest].rstrip("-")
