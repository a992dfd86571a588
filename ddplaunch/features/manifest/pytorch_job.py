"""Builds the spec of a PyTorchJob for Kubeflow's Training Operator, which sets RANK in pods (``clusters/kubeflow``).

The fields are those of kubeflow.org/v1, pkg/apis/kubeflow.org/v1 of its release 1.9; facts about the operator are
from pkg/controller.v1 there.
"""

from __future__ import annotations

from typing import Any

from ddplaunch.features.manifest.pod_job import PodJob, refuse_options
from ddplaunch.features.manifest.pod_spec import pod_spec
from ddplaunch.features.manifest.yaml_writer import drop_empty, with_comment

_CONTAINER = "pytorch"  # the operator requires this name
_PORT = "pytorchjob-port"  # name of the port that becomes MASTER_PORT; without one the operator sets 23456
_OF_OPERATOR = {"min_nodes": "--nodes as a range", "gang": "--gang", "restricted": "--restricted"}
"""Fields that the operator itself decides, or that its init containers prevent, and their options."""


def pytorch_job(job: PodJob) -> dict[str, Any]:
    """Return the spec. Raises UsageError for options that only the operator can set."""
    refuse_options(job, _OF_OPERATOR, "the operator decides that", "leave it out, or use --kind jobset")
    pod = {
        name: each for name, each in pod_spec(job).items() if name != "restartPolicy"
    }  # it belongs to the replica specs
    (container,) = pod["containers"]
    metadata = drop_empty({"labels": dict(job.labels), "annotations": dict(job.annotations)})
    container = {**container, "name": _CONTAINER}
    if job.host_ports:
        store, *others = container["ports"]
        container["ports"] = [{"name": _PORT, **store}, *others]
    template = drop_empty({"metadata": metadata, "spec": {**pod, "containers": [container]}})
    why = "The operator cannot distinguish a lost node from a failed program; --backoff-limit restarts both."
    restart = with_comment("restartPolicy", why)
    policy = "OnFailure" if job.retries else "Never"
    deleted = with_comment("ttlSecondsAfterFinished", "Then it is deleted, with its pods and their logs.")
    limit = with_comment("backoffLimit", f"All pods together: {job.retries} restarts of each.")
    run_policy = drop_empty(
        {
            deleted: job.ttl_s,
            "activeDeadlineSeconds": job.seconds,
            limit: job.retries * job.nodes + 1 if job.retries else None,  # the job fails when this number is reached
        }
    )
    master = with_comment("Master", "Node 0. A pod is a node: one ddplaunch, which starts the ranks there.")
    specs = {master: {"replicas": 1, restart: policy, "template": template}}
    if job.nodes > 1:
        specs["Worker"] = {"replicas": job.nodes - 1, "restartPolicy": policy, "template": template}
    return drop_empty({"runPolicy": run_policy, "pytorchReplicaSpecs": specs})
