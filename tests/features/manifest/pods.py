"""Simulates the pods of a manifest: variables and files as the Job controller and the kubelet make them."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

EVERY_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "KUBERNETES_PORT": "tcp://…"}
"""Of the Service that each namespace knows. A headless one is in no variable."""


@dataclass(frozen=True)
class Pod:
    """One pod of an indexed Job. Its name in the cluster's DNS is None where no Service gives it one."""

    hostname: str
    domain_name: str | None
    words: list[str]
    environ: dict[str, str]


def pods(manifest: str) -> list[Pod]:
    """Read a manifest as ``kubectl`` does, and make its pods."""
    *others, job = yaml.safe_load_all(manifest)
    services = [each for each in others if each["kind"] == "Service"]
    if job["kind"] == "PyTorchJob":
        return list(_replicas(job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]))
    if job["kind"] == "JobSet":
        return [pod for each in _jobs(job) for pod in _pods_of(each, [_service(job)])]
    return _pods_of(job, services)


def _pods_of(job: dict[str, Any], services: list[dict[str, Any]]) -> list[Pod]:
    spec, template = job["spec"], job["spec"]["template"]
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    return [_pod(index, job["metadata"], template, services) for index in range(spec["completions"])]


def _service(jobset: dict[str, Any]) -> dict[str, Any]:
    """Return the DNS name that the JobSet's controller gives to its pods."""
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    return {"metadata": jobset["metadata"], "spec": {"clusterIP": "None", "selector": {}}}


def _jobs(jobset: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The Jobs that the controller makes: JOBSET-REPLICATED-INDEX, in the subdomain of the Service."""
    for replicated in jobset["spec"]["replicatedJobs"]:
        assert replicated["replicas"] == 1
        name = jobset["metadata"]["name"]
        metadata = {**jobset["metadata"], "name": f"{name}-{replicated['name']}-0"}
        spec = copy.deepcopy(replicated["template"]["spec"])
        spec["template"]["spec"]["subdomain"] = name
        yield {"kind": "Job", "metadata": metadata, "spec": spec}


def _replicas(name: str, specs: dict[str, Any]) -> Iterator[Pod]:
    """The pods that the Training Operator makes, and the variables that it sets (pkg/controller.v1/pytorch/envvar.go).

    Each has a headless Service of its own, by whose name it is known.
    """
    places = [(kind.lower(), index) for kind in specs for index in range(specs[kind]["replicas"])]
    for rank, (kind, index) in enumerate(places):
        (container,) = specs[kind.title()]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        ports = {each.get("name"): each["containerPort"] for each in container.get("ports", ())}
        place = {"MASTER_PORT": ports.get("pytorchjob-port", 23456), "MASTER_ADDR": f"{name}-master-0"}
        place |= {f"PET_{variable}": value for variable, value in place.items()}
        place |= {"RANK": rank, "WORLD_SIZE": len(places), "PET_NODE_RANK": rank, "PET_NNODES": len(places)}
        environ = {**EVERY_POD, "PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": "auto"}
        environ |= {variable: str(value) for variable, value in place.items()}
        environ |= {each["name"]: expanded(each["value"], environ) for each in container["env"]}
        words = [expanded(word, environ) for word in (*container["command"], *container["args"])]
        yield Pod(f"{name}-{kind}-{index}", f"{name}-{kind}-{index}", words, environ)


def _pod(index: int, job: dict[str, Any], template: dict[str, Any], services: list[dict[str, Any]]) -> Pod:
    hostname = f"{job['name']}-{index}"
    labels = {
        **template["metadata"]["labels"],
        "batch.kubernetes.io/job-name": job["name"],
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    domain_name = None
    for service in services:
        same = service["metadata"].get("namespace") == job.get("namespace")
        chosen = service["spec"]["selector"].items() <= labels.items()
        headless = service["spec"]["clusterIP"] == "None"
        if same and chosen and headless and template["spec"].get("subdomain") == service["metadata"]["name"]:
            domain_name = f"{hostname}.{service['metadata']['name']}"
    container = next(each for each in template["spec"]["containers"] if each["name"] == "ddplaunch")
    environ = {**EVERY_POD, "JOB_COMPLETION_INDEX": str(index)}
    for variable in container["env"]:
        if "value" in variable:  # others are of secrets and fields, which only a cluster has
            environ[variable["name"]] = expanded(variable["value"], environ)
    words = [expanded(word, environ) for word in (*container["command"], *container["args"])]
    return Pod(hostname, domain_name, words, environ)


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand as Kubernetes does: ``$$`` is ``$``, ``$(NAME)`` a variable's value, other text stays."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)
