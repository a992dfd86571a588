"""Builds the Kubernetes manifest of a job: a pure function; the output is short enough to read before ``kubectl`` runs.

By default it has an indexed Job, whose pods are the nodes, and a headless Service that gives each pod a name; this
needs no operator. A JobSet contains this Job, and manages the Service itself; if pods differ, it has a Job for each
program with nodes of its own. Or the manifest has a job of Kubeflow. In a pod, ``ddplaunch run`` reads its node rank
from the variables that ``clusters/kubernetes`` knows. The fields are those of
kubernetes.io/docs/reference/kubernetes-api; facts about the Job controller are from its source, pkg/controller/job,
and about JobSets from kubernetes-sigs/jobset, pkg/controllers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE
from ddplaunch.features.manifest.kubeflow_jobs import TTL_FIELD, pytorchjob_spec, trainjob_spec
from ddplaunch.features.manifest.pod_job import (
    CONTAINER,
    COSCHEDULING,
    FIRST_NODE,
    JOB,
    JOBSET,
    NODE,
    PYTORCHJOB,
    TRAINJOB,
    VOLCANO,
    PodJob,
)
from ddplaunch.features.manifest.pod_spec import pod_spec
from ddplaunch.features.manifest.yaml_writer import drop_empty, with_comment, write_yaml

RETRY_EXIT_CODES = (EXIT_UNAVAILABLE, EXIT_PREEMPTED, EXIT_SIGNAL + 15)
"""Exit codes of launchers that ended because a pod of the job was evicted, preempted or lost."""

_POD_GROUP = "scheduling.x-k8s.io/pod-group"  # a label of pods (scheduler-plugins, apis/scheduling/v1alpha1)
_MIN_MEMBER = "scheduling.volcano.sh/group-min-member"  # an annotation of the Job (Volcano, pkg/controllers/podgroup)

_REQUIREMENTS = {
    JOBSET: "JobSet",
    TRAINJOB: "Kubeflow Trainer 2.3 or newer",  # whose PodSpecPatch first has terminationGracePeriodSeconds
    PYTORCHJOB: "Kubeflow's Training Operator",
    VOLCANO: "Volcano 1.12 or newer",
    COSCHEDULING: "the scheduler plugin Coscheduling",
}


def render_manifest(job: PodJob) -> str:
    """Write the job as YAML for ``kubectl apply``. Raises UsageError if YAML cannot hold a string."""
    version = "1.31" if job.min_nodes else "1.29"  # the first with successPolicy; the first with backoffLimitPerIndex
    newer = "" if job.kind in (TRAINJOB, PYTORCHJOB) else f", for Kubernetes {version} or newer"
    # kubectl apply keeps a copy of each object in an annotation, which has at most 256 KiB.
    verb = "create" if job.code else "apply"
    head = f"# Written by ddplaunch manifest{newer}. To submit it: kubectl {verb} -f THIS_FILE\n"
    if needs := [_REQUIREMENTS[each] for each in (job.kind, job.gang) if each in _REQUIREMENTS]:
        head += f"# The cluster must have {' and '.join(needs)}.\n"
    return head + "---\n".join(write_yaml(each) for each in build_objects(job))


def build_objects(job: PodJob) -> Iterator[dict[str, Any]]:
    """Yield the Kubernetes objects of the job, with comments; the Job, JobSet or job of Kubeflow is last."""
    metadata = drop_empty({"name": job.name, "namespace": job.namespace, "labels": _labels(job)})
    if job.gang == COSCHEDULING:
        group = {with_comment("minMember", _min_member_comment(job)): job.required_nodes}
        yield {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup", "metadata": metadata, "spec": group}
    yield from _config_maps(job, metadata)
    if job.kind == JOB and job.nodes > 1:
        yield {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": _service_spec(job)}
    annotations = {**job.annotations, **(_gang_annotations(job) if job.kind == JOB else {})}
    version, kind, spec_of = _KINDS[job.kind]
    spec = spec_of(job)
    if job.kind != PYTORCHJOB:
        spec = {**drop_empty({TTL_FIELD: job.ttl_s}), **spec}
    annotated = metadata | drop_empty({"annotations": annotations})
    yield {"apiVersion": version, "kind": kind, "metadata": annotated, "spec": spec}


def _config_maps(job: PodJob, metadata: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the ConfigMaps with the code of --code."""
    if job.code is None:
        return
    kind = with_comment("kind", "A part of the code. Created by hand, it stays when the job is deleted.")
    for part in job.code.parts:
        head = {"apiVersion": "v1", kind: "ConfigMap", "metadata": {**metadata, "name": part.name}}
        yield {**head, "immutable": True, "binaryData": {part.file: part.data}}


def _labels(job: PodJob) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "ddplaunch", **job.labels}


def _gang_annotations(job: PodJob) -> dict[str, Any]:
    """Return the annotation from which Volcano creates the PodGroup; the Job owns it, so both are deleted together."""
    return {with_comment(_MIN_MEMBER, _min_member_comment(job)): str(job.required_nodes)} if job.gang == VOLCANO else {}


def _min_member_comment(job: PodJob) -> str:
    return f"{'All' if job.required_nodes == job.nodes else 'This many'} pods start together, or none."


def _service_spec(job: PodJob) -> dict[str, Any]:
    stays = f"\nIt stays when the Job is deleted: kubectl delete service {job.name}" if job.ttl_s is not None else ""
    return {
        with_comment(
            "clusterIP", f"Headless: it only gives the pods names. Node 0 is {job.node_zero_dns_name}.{stays}"
        ): "None",
        with_comment("publishNotReadyAddresses", "The nodes look for node 0 before it is ready."): True,
        "selector": job.pod_selector,
    }


def _jobset_spec(job: PodJob) -> dict[str, Any]:
    network = f"The JobSet makes a Service, which gives the pods names. Node 0 is {job.node_zero_dns_name}."
    jobs = [_replicated_job(each.name, replace(job, group=each)) for each in job.groups]
    return {
        with_comment("network", network): {"enableDNSHostnames": True},
        "replicatedJobs": jobs or [_replicated_job(NODE, job)],
    }


def _replicated_job(name: str, job: PodJob) -> dict[str, Any]:
    template = drop_empty({"metadata": drop_empty({"annotations": _gang_annotations(job)}), "spec": _job(job)})
    return {"name": name, "replicas": 1, "template": template}


def _job(job: PodJob) -> dict[str, Any]:
    pods = job.group.pods if job.group else job.nodes
    what = "programs" if job.group and job.group.first_node else "ranks"
    spec: dict[str, Any] = {
        with_comment("completionMode", f"A pod is a node: one ddplaunch, which starts the {what} there."): "Indexed",
        "completions": pods,
        "parallelism": pods,
    }
    if job.seconds is not None:
        deadline = with_comment("activeDeadlineSeconds", "From its creation: includes time in which pods wait.")
        spec[deadline] = job.seconds
    if job.min_nodes:
        done = "Node 0 ends when all have; a pod that never joined is not waited for."
        spec[with_comment("successPolicy", done)] = {"rules": [{"succeededIndexes": "0"}]}
    labels = {**_labels(job), **({_POD_GROUP: job.name} if job.gang == COSCHEDULING else {})}
    annotations = {**job.annotations, **({FIRST_NODE: str(job.group.first_node)} if job.group else {})}
    ends = "All pods end together. If one was evicted or lost, all restart,"
    if job.min_nodes:
        ends = "A pod that is lost or evicted restarts and joins; if that is pod 0, all restart,"
    ends += " after 10 s, then 20 s, …;\nif the program failed, the job fails."
    action, retries, limit = "Count", "How often a pod restarts, for any cause.", job.retries
    if limit is None:
        action, retries, limit = "Ignore", "A pod that could not start is retried three times.", 3
    return {
        **spec,
        with_comment("podFailurePolicy", ends): {"rules": _pod_failure_rules(action)},
        # Per index, since the delay before retries of the whole Job is 10 s times 2 to the number of failed pods. The
        # counts are for pods without an exit code, say rejected by a machine; an index that fails ends the rest.
        with_comment("backoffLimitPerIndex", retries): limit,
        "maxFailedIndexes": job.nodes - job.required_nodes,
        "template": {"metadata": drop_empty({"labels": labels, "annotations": annotations}), "spec": pod_spec(job)},
    }


def _pod_failure_rules(action: str) -> list[Any]:
    """Return the rules for failed pods; the first that matches decides.

    A disrupted pod may have an exit code too, so the rule for its condition comes first. This condition is the same for
    preemption, eviction and lost machines. If restarts are limited, both rules count the restart: when one pod is
    evicted, all pods end together, but only the evicted one has the condition.
    """
    codes = {"containerName": CONTAINER, "values": list(RETRY_EXIT_CODES)}
    unavailable = f"{EXIT_UNAVAILABLE}: a node was lost or never joined."
    meanings = f"{unavailable} {EXIT_PREEMPTED}: preempted. {EXIT_SIGNAL + 15}: SIGTERM."
    return [
        {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {with_comment("action", meanings): action, "onExitCodes": {"operator": "In", **codes}},
        {"action": "FailJob", "onExitCodes": {"operator": "NotIn", **codes}},
    ]


_KINDS: dict[str, tuple[str, str, Callable[[PodJob], dict[str, Any]]]] = {
    JOB: ("batch/v1", "Job", _job),
    JOBSET: ("jobset.x-k8s.io/v1alpha2", "JobSet", _jobset_spec),
    TRAINJOB: ("trainer.kubeflow.org/v1alpha1", "TrainJob", trainjob_spec),
    PYTORCHJOB: ("kubeflow.org/v1", "PyTorchJob", pytorchjob_spec),
}
"""For each kind: API version, name in the API, and the function that builds its spec."""
