"""The Kubernetes objects that are read, with the fields that are used; other fields are skipped.

The fields are those of kubernetes.io/docs/reference/kubernetes-api; of a JobSet those of jobset.x-k8s.io/v1alpha2, of
Kubeflow's jobs those of trainer.kubeflow.org/v1alpha1 and kubeflow.org/v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from ddplaunch.features.kubernetes.kubectl import Collection
from ddplaunch.features.manifest.pod_job import CONTAINER, FIRST_NODE, JOB, JOB_NAME, JOBSET, PYTORCHJOB, TRAINJOB

PODS = Collection("", "v1", "pods", "Pod")
EVENTS = Collection("", "v1", "events", "Event")
CONFIG_MAPS = Collection("", "v1", "configmaps", "ConfigMap")
SERVICES = Collection("", "v1", "services", "Service")
POD_GROUPS = Collection("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
WORKLOADS = Collection("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")

JOBS = {
    JOB: Collection("batch", "v1", "jobs", "Job"),
    JOBSET: Collection("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    TRAINJOB: Collection("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    PYTORCHJOB: Collection("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
}
"""The kinds of jobs, by the names of ``--kind``."""

_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
POD_LABELS = {
    JOB: JOB_NAME,
    JOBSET: _JOBSET_NAME,
    TRAINJOB: _JOBSET_NAME,
    PYTORCHJOB: "training.kubeflow.org/job-name",
}
"""By kind of job: the pods' label with the job's name, set by its controller. A TrainJob's JobSet has its name."""

INDEX = "batch.kubernetes.io/job-completion-index"  # a label and an annotation of the pods of an indexed Job
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
_REPLICA_TYPE, _REPLICA_INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
QUEUE = "kueue.x-k8s.io/queue-name"  # a label of jobs that Kueue admits


T = TypeVar("T")


class _ApiObject(Struct, frozen=True, rename="camel"):
    pass


class Metadata(_ApiObject, frozen=True):
    name: str
    uid: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None

    def value(self, key: str) -> str | None:
        """Return the value of the label ``key``, or of the annotation ``key`` if there is no such label."""
        return (self.labels or {}).get(key) or (self.annotations or {}).get(key)


class Condition(_ApiObject, frozen=True):
    type: str
    status: str  # "True", "False" or "Unknown"
    reason: str | None = None
    message: str | None = None


class Waiting(_ApiObject, frozen=True):
    reason: str | None = None
    message: str | None = None


class ContainerStateTerminated(_ApiObject, frozen=True):
    exit_code: int = 0
    reason: str | None = None
    message: str | None = None
    finished_at: str | None = None


class ContainerState(_ApiObject, frozen=True):
    waiting: Waiting | None = None
    running: Mapping[str, object] | None = None
    terminated: ContainerStateTerminated | None = None


class ContainerStatus(_ApiObject, frozen=True):
    name: str
    image: str = ""
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()  # of the previous container


class PodStatus(_ApiObject, frozen=True):
    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None


class Container(_ApiObject, frozen=True):
    name: str
    image: str = ""
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None


class PodSpec(_ApiObject, frozen=True):
    containers: tuple[Container, ...] = ()
    restart_policy: str = "Always"


_CONTAINERS = (CONTAINER, "node", "pytorch")  # ddplaunch's, as ``manifest`` and Kubeflow's runtimes name it


class Pod(_ApiObject, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def rank(self) -> int:
        """The node rank of this pod."""
        if index := self.metadata.value(INDEX):
            return int(index) + int(self.metadata.value(FIRST_NODE) or 0)
        index = self.metadata.value(_REPLICA_INDEX) or "0"
        return int(index) + (self.metadata.value(_REPLICA_TYPE) == "worker")

    @property
    def container(self) -> Container:
        """The container in which ddplaunch runs."""
        named = (each for each in self.spec.containers if each.name in _CONTAINERS)
        return next(named, None) or next(iter(self.spec.containers), Container("ddplaunch"))

    @property
    def container_status(self) -> ContainerStatus:
        found = (each for each in self.status.container_statuses or () if each.name == self.container.name)
        return next(found, ContainerStatus(self.container.name))

    @property
    def is_running(self) -> bool:
        return self.container_status.state.running is not None

    @property
    def has_previous_log(self) -> bool:
        """Whether the kubelet keeps a log of the container that ran in this pod before the last restart."""
        status = self.container_status
        return status.last_state.terminated is not None and status.state.waiting is None

    @property
    def has_log(self) -> bool:
        """Whether the container runs or has run; while it waits for a restart, the log is that of the previous one."""
        return self.is_running or self.terminated is not None or self.container_status.last_state.terminated is not None

    @property
    def terminated(self) -> ContainerStateTerminated | None:
        """How the pod's container ended; None if it runs, or never ran."""
        return self.container_status.state.terminated

    @property
    def has_ended(self) -> bool:
        return self.terminated is not None or self.status.phase in ("Succeeded", "Failed")

    def condition(self, kind: str) -> Condition | None:
        return next((each for each in self.status.conditions or () if each.type == kind), None)


class RunPolicy(_ApiObject, frozen=True):
    suspend: bool | None = None


class ReplicatedJob(_ApiObject, frozen=True):
    name: str


class JobSpec(_ApiObject, frozen=True):
    suspend: bool | None = None
    run_policy: RunPolicy | None = None  # of a PyTorchJob
    replicated_jobs: tuple[ReplicatedJob, ...] | None = None  # of a JobSet

    @property
    def is_suspended(self) -> bool:
        return bool(self.suspend or (self.run_policy and self.run_policy.suspend))


class JobStatus(_ApiObject, frozen=True):
    conditions: tuple[Condition, ...] | None = None


class Job(_ApiObject, frozen=True):
    """A Job, a JobSet, or a job of Kubeflow."""

    metadata: Metadata
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()

    def condition(self, *kinds: str) -> Condition | None:
        """Return a condition of one of these types whose status is "True"; None if there is none."""
        found = (each for each in self.status.conditions or () if each.type in kinds and each.status == "True")
        return next(found, None)


class Event(_ApiObject, frozen=True):
    type: str | None = None  # "Normal" or "Warning"
    reason: str | None = None
    message: str | None = None
    last_timestamp: str | None = None


class Workload(_ApiObject, frozen=True):
    """Kueue's object Workload: Kueue creates one for each job, and queues it until the job may start."""

    metadata: Metadata
    status: JobStatus = JobStatus()


class _List(Struct, Generic[T], frozen=True):
    items: tuple[T, ...] | None = None


def decode_job(data: bytes) -> Job:
    return msgspec.json.decode(data, type=Job)


def decode_jobs(data: bytes) -> list[Job]:
    return [*(msgspec.json.decode(data, type=_List[Job]).items or ())]


def decode_pods(data: bytes) -> list[Pod]:
    """Decode a list of pods, the earliest first."""
    found = msgspec.json.decode(data, type=_List[Pod]).items or ()
    return sorted(found, key=lambda pod: (pod.metadata.creation_timestamp or "", pod.name))


def decode_events(data: bytes) -> list[Event]:
    """Decode a list of events, the latest first."""
    found = msgspec.json.decode(data, type=_List[Event]).items or ()
    return sorted(found, key=lambda event: event.last_timestamp or "", reverse=True)


def decode_workloads(data: bytes) -> list[Workload]:
    return [*(msgspec.json.decode(data, type=_List[Workload]).items or ())]
