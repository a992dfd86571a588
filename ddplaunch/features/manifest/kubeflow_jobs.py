"""Builds the specs of Kubeflow's jobs: a TrainJob for Trainer v2, a PyTorchJob for the Training Operator.

The runtime of a TrainJob makes the JobSet, and the TrainJob overrides parts of it; options for fields that a TrainJob
cannot override are rejected. The fields are those of trainer.kubeflow.org/v1alpha1, whose runtimes set PET_* in the
pods (``clusters/kubeflow``).

The operator of a PyTorchJob sets RANK in pods (``clusters/kubeflow``). The fields are those of kubeflow.org/v1,
pkg/apis/kubeflow.org/v1 of its release 1.9; facts about the operator are from pkg/controller.v1 there.
"""

from __future__ import annotations

from typing import Any

from ddplaunch.cli import LAUNCHER_COMMENT
from ddplaunch.features.manifest.pod_job import NODE, PodJob, refuse_options
from ddplaunch.features.manifest.pod_spec import REQUESTS_COMMENT, pod_spec
from ddplaunch.features.manifest.yaml_writer import drop_empty, with_comment

TTL_FIELD = with_comment("ttlSecondsAfterFinished", "Then it is deleted, with its pods and their logs.")
RUNTIME = "torch-distributed"  # the ClusterTrainingRuntime that comes with Kubeflow Trainer

_MANAGER = "ddplaunch"  # the name under which the runtime is patched
_PATCHED = (
    *("terminationGracePeriodSeconds", "nodeSelector", "affinity", "tolerations", "serviceAccountName"),
    *("imagePullSecrets", "securityContext", "volumes"),
)
"""The fields of a pod that a TrainJob may change (PodSpecPatch)."""

_OF_RUNTIME = {
    "min_nodes": "--nodes as a range",
    "retries": "--backoff-limit",
    "ttl_s": "--ttl",
    "gang": "--gang",
    "scheduler": "--scheduler-name",
    "priority_class": "--priority-class",
    "host_network": "--host-network",
    "spread": "--spread",
    "env_from_secrets": "--env-secret without a NAME",
    "pull": "--image-pull-policy",
}
"""Fields that only the runtime can set, and their options."""


def trainjob_spec(job: PodJob) -> dict[str, Any]:
    """Return the spec of a TrainJob. Raises UsageError for options that only the runtime can set."""
    hint = "leave it out, or use --kind jobset, or --runtime with one that has it"
    refuse_options(job, _OF_RUNTIME, "the runtime decides that", hint)
    pod = pod_spec(job)
    (container,) = pod["containers"]
    requested, resources = container.get("resources", {}), "resourcesPerNode"
    resources = with_comment(resources, REQUESTS_COMMENT) if "limits" in requested else resources
    trainer = drop_empty(
        {
            "image": job.image,
            with_comment("command", LAUNCHER_COMMENT): container["command"],
            "args": container["args"],
            "numNodes": job.nodes,
            "env": container.get("env"),
            resources: requested,
        }
    )
    own = {name: each for name, each in container.items() if name in ("securityContext", "volumeMounts")}
    patch = {name: each for name, each in pod.items() if name in _PATCHED} | {"containers": [{"name": NODE, **own}]}
    nodes = {"name": NODE, "template": {"spec": {"template": _template(job, patch)}}}
    return {
        "runtimeRef": {"name": job.runtime or RUNTIME},
        **drop_empty({"activeDeadlineSeconds": job.seconds}),
        "trainer": trainer,
        "runtimePatches": [
            {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [nodes]}}}}
        ],
    }


_CONTAINER = "pytorch"  # the operator requires this name
_PORT = "pytorchjob-port"  # name of the port that becomes MASTER_PORT; without one the operator sets 23456
_OF_OPERATOR = {"min_nodes": "--nodes as a range", "gang": "--gang", "restricted": "--restricted"}
"""Fields that the operator itself decides, or that its init containers prevent, and their options."""


def pytorchjob_spec(job: PodJob) -> dict[str, Any]:
    """Return the spec of a PyTorchJob. Raises UsageError for options that only the operator can set."""
    refuse_options(job, _OF_OPERATOR, "the operator decides that", "leave it out, or use --kind jobset")
    pod = pod_spec(job)
    del pod["restartPolicy"]  # it belongs to the replica specs
    (container,) = pod["containers"]
    container = {**container, "name": _CONTAINER}
    if job.host_ports:
        store, *others = container["ports"]
        container["ports"] = [{"name": _PORT, **store}, *others]
    template = _template(job, {**pod, "containers": [container]})
    why = "The operator cannot distinguish a lost node from a failed program; --backoff-limit restarts both."
    restart = with_comment("restartPolicy", why)
    policy = "OnFailure" if job.retries else "Never"
    limit = with_comment("backoffLimit", f"All pods together: {job.retries} restarts of each.")
    run_policy = drop_empty(
        {
            TTL_FIELD: job.ttl_s,
            "activeDeadlineSeconds": job.seconds,
            limit: job.retries * job.nodes + 1 if job.retries else None,  # the job fails when this number is reached
        }
    )
    master = with_comment("Master", "Node 0. A pod is a node: one ddplaunch, which starts the ranks there.")
    specs = {master: {"replicas": 1, restart: policy, "template": template}}
    if job.nodes > 1:
        specs["Worker"] = {"replicas": job.nodes - 1, "restartPolicy": policy, "template": template}
    return drop_empty({"runPolicy": run_policy, "pytorchReplicaSpecs": specs})


def _template(job: PodJob, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = drop_empty({"labels": dict(job.labels), "annotations": dict(job.annotations)})
    return drop_empty({"metadata": metadata, "spec": spec})
