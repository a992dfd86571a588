"""The objects of Kubernetes as dictionaries: pods as their controllers make them, and what the API server replies."""

import random
import string
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from tests.features.manifest.pods import EVERY_POD, expanded

Object = dict[str, Any]

INDEX = "batch.kubernetes.io/job-completion-index"


def now(nanoseconds: int | None = None) -> str:
    """A timestamp as metadata has it, or, of a line of a log, with nanoseconds."""
    seconds, rest = divmod(time.time_ns() if nanoseconds is None else nanoseconds, 10**9)
    text = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}Z" if nanoseconds is None else f"{text}.{rest:09}Z"


def status_reply(code: int, reason: str, message: str) -> Object:
    """What the API server replies instead of an object."""
    fields = {"status": "Failure" if code >= 400 else "Success", "reason": reason, "message": message, "code": code}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **fields}


def with_metadata(obj: Object, namespace: str) -> Object:
    metadata = {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now(), **obj["metadata"]}
    return {**obj, "metadata": metadata, "status": obj.get("status", {})}


def job_templates(job: Object) -> Iterator[tuple[str, int, Object]]:
    """The pods of a job: the beginning of each name, its index, and its template with the controller's labels."""
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "PyTorchJob":
        for kind, replica in spec["pytorchReplicaSpecs"].items():
            for index in range(replica["replicas"]):
                labels = {
                    f"training.kubeflow.org/{key}": value
                    for key, value in (
                        ("job-name", name),
                        ("replica-type", kind.lower()),
                        ("replica-index", str(index)),
                    )
                }
                template = {**replica["template"], "restartPolicy": replica["restartPolicy"]}
                yield f"{name}-{kind.lower()}-{index}", index, _labelled(template, labels)
        return
    if job["kind"] == "JobSet":
        for replicated in spec["replicatedJobs"]:
            prefix, labels = f"{name}-{replicated['name']}-0", _jobset_labels(name, replicated["name"])
            yield from _indexed_templates(prefix, replicated["template"]["spec"], labels)
    elif job["kind"] == "TrainJob":
        yield from _indexed_templates(f"{name}-node-0", _runtime_job(spec), _jobset_labels(name, "node"))
    else:
        yield from _indexed_templates(name, spec, {})


def _indexed_templates(prefix: str, spec: Object, labels: dict[str, str]) -> Iterator[tuple[str, int, Object]]:
    for index in range(spec["completions"]):
        own = {**labels, "batch.kubernetes.io/job-name": prefix, INDEX: str(index)}
        yield (
            f"{prefix}-{index}-{''.join(random.choices(string.ascii_lowercase, k=5))}",
            index,
            _labelled(spec["template"], own),
        )


def _jobset_labels(name: str, replicated: str) -> dict[str, str]:
    return {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": replicated}


def _runtime_job(spec: Object) -> Object:
    """The Job of the runtime torch-distributed, as Kubeflow Trainer makes it of a TrainJob."""
    trainer, (patch,) = spec["trainer"], spec["runtimePatches"]
    (nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert (spec["runtimeRef"]["name"], nodes["name"]) == ("torch-distributed", "node")
    template = nodes["template"]["spec"]["template"]
    (patched,) = template["spec"]["containers"]
    own = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
    container = {**own, **patched, "resources": trainer.get("resourcesPerNode", {})}
    return {
        "completions": trainer["numNodes"],
        "template": {**template, "spec": {**template["spec"], "containers": [container]}},
    }


def _labelled(template: Object, labels: dict[str, str]) -> Object:
    metadata = template.get("metadata", {})
    return {**template, "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **labels}}}


def pod_variables(pod: Object, job: Object, port: int) -> dict[str, str]:
    """The variables of a pod; the names of all pods are addresses of this machine here, as a DNS would have them."""
    labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
    environ = dict(EVERY_POD)
    if job["kind"] == "PyTorchJob":
        specs = job["spec"]["pytorchReplicaSpecs"]
        nodes = sum(each["replicas"] for each in specs.values())
        is_worker = labels["training.kubeflow.org/replica-type"] == "worker"
        rank = int(labels["training.kubeflow.org/replica-index"]) + is_worker
        environ |= {"RANK": str(rank), "WORLD_SIZE": str(nodes), "PET_NODE_RANK": str(rank), "PET_NNODES": str(nodes)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "auto"}
        environ |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
    else:
        environ["JOB_COMPLETION_INDEX"] = labels[INDEX]
    if job["kind"] == "TrainJob":
        environ |= {"PET_NNODES": str(job["spec"]["trainer"]["numNodes"]), "PET_NODE_RANK": labels[INDEX]}
        environ |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "auto"}
    for variable in container.get("env", ()):
        environ[variable["name"]] = expanded(variable["value"], environ)
    if "MASTER_ADDR" in environ:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environ
