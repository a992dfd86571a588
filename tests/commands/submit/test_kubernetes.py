"""The manifest: compared with golden files, valid for Kubernetes' own schemas, and pods get of it what was meant.

``python -m tests.commands.submit.test_kubernetes`` writes the golden files anew, to be read in the diff.
"""

from __future__ import annotations

import copy
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pydantic
import pytest
import yaml as pyyaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from ruamel.yaml import YAML

from ddplaunch.commands.manifest.kubernetes import manifest, objects
from ddplaunch.commands.manifest.pod_job import (
    Mount,
    NodeRule,
    PodJob,
    SecretVariable,
    Toleration,
    longest_name,
    name_from,
)
from ddplaunch.errors import UsageError
from ddplaunch.plan.command import python_command
from tests.commands.submit.pods import expanded, pods
from tests.commands.submit.test_yaml import NASTY

GOLDEN = Path(__file__).parent / "manifests"

SMALLEST = PodJob(command=["train.py"], name="train", image="registry.example/wine:1")

MANY = [f"--option-{number}" for number in range(9)]

JOBS = {
    "smallest": SMALLEST,
    "two_nodes": replace(
        SMALLEST,
        command=["--max-restarts", "2", "train.py", "--", "--lr", "0.1", "--name", "it's: a #test", "$HOME", "$(HOME)"],
        nodes=2, gpus=8, cpus=64, memory="200Gi", seconds=4 * 3600,
    ),
    "everything": replace(
        SMALLEST, command=["--nproc", "4", "--grace", "90.5", "-m", "wine.train", "--", *MANY, "a\nb"],
        name="wine-16", image="nvcr.io/nvidia/pytorch:25.01-py3", nodes=16, gpus=4, grace=90.5, namespace="vision",
        labels={"team": "vision", "kueue.x-k8s.io/queue-name": "1e3"},
        node_labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "on": "yes"},
        variables={"NCCL_DEBUG": "INFO", "PRICE": "$(cat x) is 5$", "EMPTY": ""},
        mounts=[Mount("sets", "/sets", read_only=True), Mount("/scratch", "/scratch dir")],
    ),
    "rdma": replace(
        SMALLEST, nodes=4, gpus=8, cpus=180, memory="1800Gi",
        resources={"rdma/hca_shared_devices_a": 8, "hugepages-2Mi": "5Gi"},
        requests={"cpu": 96, "memory": "1500Gi"}, shm="256Gi", retries=5, kept=86400,
        annotations={"k8s.v1.cni.cncf.io/networks": "ib0,ib1"}, node_labels={"pool": "h100"},
        node_rules=[
            NodeRule("nvidia.com/gpu.product", "In", ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")),
            NodeRule("kubernetes.io/hostname", "NotIn", ("n07",)),
        ],
        tolerations=[Toleration("nvidia.com/gpu"), Toleration("team", "vision", "NoSchedule")],
        priority_class="training", gang="coscheduling", host_network=True, host_ports=(29500, 29501),
        service_account="trainer", pull_secrets=["registry"], variables={"NCCL_DEBUG": "INFO"},
        secret_variables=[SecretVariable("HF_TOKEN", "hugging-face", "token")], secrets=["wandb"],
        mounts=[
            Mount("wine-data", "/data"),
            Mount("configmap/nccl", "/etc/nccl"),
            Mount("secret/keys", "/keys", read_only=True),
            Mount("emptydir/2Ti", "/scratch"),
            Mount("emptydir", "/tmp"),
        ],
    ),
    "jobset": replace(SMALLEST, nodes=2, gpus=8, kind="jobset", gang="volcano", kept=3600, annotations={"a/b": "c"}),
    "restricted": replace(
        SMALLEST, nodes=2, gpus=8, restricted=True, user=(1000, 3000), pull="IfNotPresent",
        spread=["topology.kubernetes.io/zone"], apart=["kubernetes.io/hostname"],
        node_rules=[NodeRule("pool", "In", ("a", "b"))],
    ),
    "trainjob": replace(
        SMALLEST, kind="trainjob", runtime="torch-distributed", nodes=4, gpus=8, memory="200Gi", seconds=3600,
        restricted=True, labels={"team": "vision"}, variables={"NCCL_DEBUG": "INFO"},
        secret_variables=[SecretVariable("HF_TOKEN", "hugging-face", "token")],
        tolerations=[Toleration("nvidia.com/gpu")], node_labels={"pool": "h100"}, pull_secrets=["registry"],
        service_account="trainer", mounts=[Mount("wine-data", "/data")],
    ),
    "elastic": replace(SMALLEST, command=["--grow", "train.py"], nodes=4, min_nodes=2, gang="volcano"),
}  # fmt: skip

NEWEST = int(kubernetes_validate.latest_version().split(".")[1])

VERSIONS = [f"1.{minor}" for minor in range(29, NEWEST + 1)]
"""The Kubernetes that the manifest says it is for."""

EACH = pytest.mark.parametrize("name", JOBS)


def read(text: str) -> list[dict[str, Any]]:
    """Both readers' idea of it, which is one."""
    old = list(pyyaml.safe_load_all(text))
    assert old == list(YAML(typ="safe", pure=True).load_all(io.StringIO(text)))
    return old


def check(each: dict[str, Any], version: str = VERSIONS[-1]) -> None:
    """Check against this very version's schema, which refuses fields that it does not know.

    Of a JobSet, whose schema is JobSet's own, this is the Job in it. Of a PodGroup nobody publishes a schema.
    """
    if each["kind"] == "JobSet":
        check_model(JobsetV1alpha2JobSet, each)
        (replicated,) = each["spec"]["replicatedJobs"]
        each = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    if each["kind"] == "TrainJob":
        check_model(TrainerV1alpha1TrainJob, each)
    if each["kind"] in ("PodGroup", "TrainJob"):
        return
    assert kubernetes_validate.validate(each, version, strict=True) == version


def check_model(model: Any, each: dict[str, Any]) -> None:
    """Check against a model of Kubeflow's, also that of JobSet's API; it refuses types, and drops unknown fields."""
    known = model.from_dict(copy.deepcopy(each))
    assert known is not None
    assert all(known.to_dict()["spec"].get(name) == value for name, value in each["spec"].items())


@EACH
def test_golden(name):
    assert manifest(JOBS[name]) == (GOLDEN / f"{name}.yaml").read_text()


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


@EACH
def test_it_is_read_as_it_is_meant(name):
    job = JOBS[name]
    assert read(manifest(job)) == list(objects(job))
    assert max(len(line) for line in manifest(job).splitlines()) <= 144


@EACH
@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes_take_it(name, version):
    if JOBS[name].min_nodes and version in ("1.29", "1.30"):
        assert "Kubernetes 1.31 or newer" in manifest(JOBS[name])
        return
    for each in read(manifest(JOBS[name])):
        check(each, version)


def test_the_first_of_them_is_named():
    assert f"Kubernetes {VERSIONS[0]} or newer" in manifest(SMALLEST)


_CONTAINER = ("spec", "template", "spec", "containers", 0)
_REPLICATED = ("spec", "replicatedJobs", 0)
_PATCH = ("spec", "runtimePatches", 0)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("two_nodes", ("spec", "backofLimitPerIndex"), 3),
        ("two_nodes", (*_CONTAINER, "resources", "limit"), {}),
        ("two_nodes", (*_CONTAINER, "env", 0, "value"), 2),
        ("two_nodes", (*_CONTAINER, "args"), "train.py"),
        ("two_nodes", ("spec", "podFailurePolicy", "rules", 0, "onPodConditions", 0, "status"), True),
        ("two_nodes", ("spec", "completions"), "2"),
        ("jobset", ("spec", "ttlSecondsAfterFinish"), 3),
        ("jobset", ("spec", "ttlSecondsAfterFinished"), "3"),
        ("jobset", (*_REPLICATED, "replica"), 1),
        ("jobset", (*_REPLICATED, "template", "spec", "completions"), "2"),
        ("trainjob", ("spec", "trainer", "numNode"), {}),
        ("trainjob", (*_PATCH, "managr"), {}),
        ("trainjob", (*_PATCH, "trainingRuntimeSpec", "spec"), {}),
    ],
)
def test_the_schemas_would_tell(name, path, value):
    *_, job = read(manifest(JOBS[name]))
    check(job)
    place = job
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError, pydantic.ValidationError)):
        check(job)


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def broken_rules(job: dict[str, Any]) -> list[str]:
    """The rules of the level "restricted" that a Job's pods break (Pod Security Standards, in Kubernetes' manual)."""
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pod, own = spec.get("securityContext", {}), container.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    rules = {
        "host namespaces": not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
        "host ports": not any(port.get("hostPort") for port in container.get("ports", ())),
        "volumes": all(VOLUMES & each.keys() for each in spec["volumes"]),
        "privilege escalation": own.get("allowPrivilegeEscalation") is False,
        "non-root": pod.get("runAsNonRoot") is True and pod.get("runAsUser") != 0,
        "seccomp": pod.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
        "capabilities": capabilities.get("drop") == ["ALL"] and {*capabilities.get("add", ())} <= {"NET_BIND_SERVICE"},
    }
    return [rule for rule, kept in rules.items() if not kept]


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_restricted_pods_meet_the_standard(kind):
    mounts = [Mount("sets", "/sets", read_only=True), Mount("emptydir", "/tmp"), Mount("configmap/nccl", "/etc/nccl")]
    job = replace(JOBS["restricted"], kind=kind, mounts=mounts)
    *_, found = read(manifest(job))
    check(found)
    found = found["spec"]["replicatedJobs"][0]["template"] if kind == "jobset" else found
    assert broken_rules(found) == []
    paths = [each["mountPath"] for each in found["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]]
    assert paths == ["/dev/shm", "/sets", "/tmp", "/etc/nccl"]
    (other,) = read(manifest(SMALLEST))
    assert broken_rules(other) == ["privilege escalation", "non-root", "seccomp", "capabilities"]
    assert "host namespaces" in broken_rules(read(manifest(JOBS["rdma"]))[-1])


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_pods_are_told_from_those_of_other_jobs(kind):
    *_, job = read(manifest(replace(JOBS["restricted"], kind=kind)))
    job = job["spec"]["replicatedJobs"][0]["template"] if kind == "jobset" else job
    spec = job["spec"]["template"]["spec"]
    label = {"job": "batch.kubernetes.io/job-name", "jobset": "jobset.sigs.k8s.io/jobset-name"}[kind]
    (spread,) = spec["topologySpreadConstraints"]
    (apart,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert spread["labelSelector"] == apart["labelSelector"] == {"matchLabels": {label: "train"}}


def test_a_trainjob_changes_in_its_runtime_what_was_asked_for():
    (job,) = read(manifest(JOBS["trainjob"]))
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"pool": "h100"}, "trainer")
    assert {each["name"] for each in pod["volumes"]} == {"shm", "tmp", "mount-1"}
    assert [each["name"] for each in job["spec"]["trainer"]["env"]] == ["HF_TOKEN", "NCCL_DEBUG"]
    assert job["spec"]["trainer"]["command"][-3:] == ["run", "--cluster", "kubeflow"]


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"min_nodes": 1}, "--nodes as a range"), ({"retries": 3}, "--backoff-limit"), ({"kept": 60}, "--ttl"),
        ({"gang": "volcano"}, "--gang"), ({"spread": ["zone"]}, "--spread"),
        ({"pull": "Always"}, "--image-pull-policy"),
    ],
)  # fmt: skip
def test_what_the_runtime_decides_is_refused(fields, option):
    with pytest.raises(UsageError, match=f"{option} does not work with --kind trainjob"):
        manifest(replace(JOBS["trainjob"], **fields))


# ------------------------------------------------------------------------------------------------------------- pods


@pytest.mark.parametrize(("kind", "prefix"), [("job", "train-"), ("jobset", "train-node-0-")])
@pytest.mark.parametrize("nodes", [2, 11])
def test_the_pods_are_the_nodes(kind, prefix, nodes):
    job = pods(manifest(replace(SMALLEST, nodes=nodes, kind=kind)))
    assert [pod.hostname for pod in job] == [f"{prefix}{index}" for index in range(nodes)]
    assert {pod.environ["MASTER_ADDR"] for pod in job} == {job[0].domain_name} == {f"{prefix}0.train"}
    assert [pod.environ["JOB_COMPLETION_INDEX"] for pod in job] == [str(index) for index in range(nodes)]
    assert {pod.environ["DDPLAUNCH_NNODES"] for pod in job} == {str(nodes)}


def test_one_node_needs_no_name():
    (pod,) = pods(manifest(SMALLEST))
    assert (pod.domain_name, "MASTER_ADDR" in pod.environ) == (None, False)
    assert [each["kind"] for each in read(manifest(SMALLEST))] == ["Job"]
    assert [each["kind"] for each in read(manifest(JOBS["jobset"]))] == ["JobSet"], "which makes its Service itself"


def test_what_the_container_gets():
    """Every word and value as it was, though YAML and Kubernetes each have a mind of their own about some."""
    words = [*NASTY, "$", "$$", "$$$", "$(HOME)", "$$(HOME)", "$(", "a$(b)c$d$$", "$(JOB_COMPLETION_INDEX)", "${HOME}"]
    job = replace(SMALLEST, command=["train.py", "--", *words], variables={f"V{i}": w for i, w in enumerate(words)})
    (pod,) = pods(manifest(job))
    assert pod.words == [*python_command("python"), "run", "--cluster", "kubernetes", *job.command]
    assert {name: pod.environ[name] for name in job.variables} == job.variables


def test_the_expansion_of_kubernetes():
    """The samples are those of its own test (third_party/forked/golang/expansion/expand_test.go)."""
    variables = {"VAR_A": "A", "VAR_B": "B", "VAR_EMPTY": ""}
    for text, meant in {
        "$(VAR_A)-$(VAR_B)": "A-B",
        "$$(VAR_B)_$(VAR_A)": "$(VAR_B)_A",
        "$$$(VAR_A)": "$A",
        "$$$$(VAR_A)": "$$(VAR_A)",
        "f000-$$VAR_A": "f000-$VAR_A",
        "foo$(VAR_EMPTY)bar": "foobar",
        "$(VAR_C)": "$(VAR_C)",
        "$VAR_A)": "$VAR_A)",
        "$(VAR_A": "$(VAR_A",
        "$": "$",
        "": "",
    }.items():
        assert expanded(text, variables) == meant


@pytest.mark.parametrize(
    ("grace", "checkpoint", "seconds"), [(30.0, 0.0, 40), (0.0, 0.0, 10), (2.5, 0.0, 13), (5.5, 60.0, 76)]
)
def test_the_kubelet_waits_longer_than_the_ranks_may(grace, checkpoint, seconds):
    (job,) = read(manifest(replace(SMALLEST, grace=grace, preempt_grace=checkpoint)))
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


def verdict(job: dict[str, Any], code: int | None, *conditions: str) -> str:
    """What becomes of a failed pod: the first rule that fits, or the count (pod_failure_policy.go)."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        wanted = rule.get("onExitCodes")
        if wanted and code:
            assert wanted["containerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]
            if (code in wanted["values"]) == (wanted["operator"] == "In"):
                return rule["action"]
        patterns = {(each["type"], each["status"]) for each in rule.get("onPodConditions", [])}
        if patterns & {(condition, "True") for condition in conditions}:
            return rule["action"]
    return "Count"


@pytest.mark.parametrize(
    ("code", "conditions", "action"),
    [
        (1, [], "FailJob"),
        (2, [], "FailJob"),
        (137, [], "FailJob"),  # memory, say
        (69, [], "Ignore"),
        (75, [], "Ignore"),
        (143, [], "Ignore"),
        (137, ["DisruptionTarget"], "Ignore"),  # the grace was too short
        (1, ["DisruptionTarget"], "Ignore"),
        (None, ["DisruptionTarget"], "Ignore"),  # the machine was lost
        (None, [], "Count"),
    ],
)
def test_who_is_started_again(code, conditions, action):
    (job,) = read(manifest(SMALLEST))
    assert verdict(job, code, *conditions) == action
    (bound,) = read(manifest(replace(SMALLEST, retries=3)))
    assert verdict(bound, code, *conditions) == ("Count" if action == "Ignore" else action)
    assert (bound["spec"]["backoffLimitPerIndex"], bound["spec"]["maxFailedIndexes"]) == (3, 0)


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("train.py", "train"), ("./deep/Train_Me.py", "train-me"), ("train.py:main", "train-main"),
        ("wine.train:main", "wine-train-main"), ("wine.train", "wine-train"), ("/usr/bin/echo", "echo"),
        ("3d.py", "job-3d"), ("a.pyx.python", "a-pyx-python"), ("---", "job"), ("été.py", "t"), ("日本.py", "job"),
        ("x" * 80, "x" * 61), ("x" * 60 + "_y", "x" * 60),
    ],
)  # fmt: skip
def test_names_from_targets(target, name):
    assert name_from(target, longest_name(2)) == name


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("nodes", [1, 10, 11, 101, 1000])
def test_the_last_pod_has_a_name_too(nodes, kind):
    longest = longest_name(nodes, kind)
    name = name_from("y" * 99, longest)
    assert len(name) == longest
    last = pods(manifest(replace(SMALLEST, name=name, nodes=nodes, kind=kind)))[-1].hostname
    assert len(last) == 63
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", last)


if __name__ == "__main__":
    for each, job in JOBS.items():
        (GOLDEN / f"{each}.yaml").write_text(manifest(job))
