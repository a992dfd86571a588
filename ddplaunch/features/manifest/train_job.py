"""Builds the spec of a TrainJob for Kubeflow Trainer v2: its runtime makes the JobSet, the TrainJob overrides parts.

The fields are those of trainer.kubeflow.org/v1alpha1, whose runtimes set PET_* in the pods (``clusters/kubeflow``).
Options for fields that a TrainJob cannot override are rejected.
"""

from __future__ import annotations

from typing import Any

from ddplaunch.features.manifest.pod_job import NODE, PodJob, refuse_options
from ddplaunch.features.manifest.pod_spec import REQUESTS_COMMENT, pod_spec
from ddplaunch.features.manifest.yaml_writer import drop_empty, with_comment

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
    "whole_secrets": "--env-secret without a NAME",
    "pull": "--image-pull-policy",
}
"""Fields that only the runtime can set, and their options."""


def train_job(job: PodJob) -> dict[str, Any]:
    """Return the spec. Raises UsageError for options that only the runtime can set."""
    hint = "leave it out, or use --kind jobset, or --runtime with one that has it"
    refuse_options(job, _OF_RUNTIME, "the runtime decides that", hint)
    pod = pod_spec(job)
    (container,) = pod["containers"]
    requested, resources = container.get("resources", {}), "resourcesPerNode"
    resources = with_comment(resources, REQUESTS_COMMENT) if "limits" in requested else resources
    trainer = drop_empty(
        {
            "image": job.image,
            "command": container["command"],
            "args": container["args"],
            "numNodes": job.nodes,
            "env": container.get("env"),
            resources: requested,
        }
    )
    own = {name: each for name, each in container.items() if name in ("securityContext", "volumeMounts")}
    patch = {name: each for name, each in pod.items() if name in _PATCHED} | {"containers": [{"name": NODE, **own}]}
    metadata = drop_empty({"labels": dict(job.labels), "annotations": dict(job.annotations)})
    template = drop_empty({"metadata": metadata, "spec": patch})
    nodes = {"name": NODE, "template": {"spec": {"template": template}}}
    return {
        "runtimeRef": {"name": job.runtime or RUNTIME},
        **drop_empty({"activeDeadlineSeconds": job.seconds}),
        "trainer": trainer,
        "runtimePatches": [
            {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [nodes]}}}}
        ],
    }
