"""Tests of the manifest: compared with golden files, valid by Kubernetes' schemas, and correct in the pods.

``python -m tests.features.manifest.test_kubernetes`` writes the golden files anew, to be read in the diff.
"""

import copy
import io
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml as pyyaml
from ruamel.yaml import YAML

from ddplaunch.cli import launcher_command
from ddplaunch.features.manifest.pod_job import derive_job_name, max_name_length
from tests.conftest import ddplaunch_command, run_command
from tests.features.manifest.pods import pods
from tests.features.manifest.test_yaml import NASTY

GOLDEN = Path(__file__).parent / "manifests"

MANY = " ".join(f"--option-{number}" for number in range(9))

IMAGE = "--container-image registry.example/wine:1"

JOBS = {
    "smallest": f"{IMAGE} train.py",
    "two_nodes": f"""{IMAGE} --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --mem 200G --time 4:00:00
        --max-restarts 2 train.py -- --lr 0.1 --name "it's: a #test" '$HOME' '$(HOME)'""",
    "everything": f"""--container-image nvcr.io/nvidia/pytorch:25.01-py3 --job-name wine-16 --namespace vision
        --nodes 16 --gpus-per-node 4 --label team=vision --label kueue.x-k8s.io/queue-name=1e3 --label a/b=
        --constraint nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3,on=yes
        --env NCCL_DEBUG=INFO --env 'PRICE=$(cat x) is 5$' --env EMPTY= --env A=1=€ --env HERE
        --container-mounts sets:/sets:ro,more:/more:rw --container-mounts '/scratch:/scratch dir'
        --nproc 4 --grace 90.5 -m wine.train -- {MANY} 'a\nb'""",
    "rdma": f"""{IMAGE} --nodes 4 --namespace vision --gpus-per-node 8 --cpus-per-task 180 --mem 1800G --shm-size 256G
        --resource rdma/hca_shared_devices_a=8 --resource hugepages-2Mi=5G --resource ephemeral-storage=1T
        --request cpu=96 --request memory=1500G --constraint
        'pool=h100,nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3|NVIDIA-H200,kubernetes.io/hostname!=n07|n08,zone!=b'
        --toleration nvidia.com/gpu --toleration a/b=c --toleration team=vision:NoSchedule --priority-class training
        --gang coscheduling --host-network --service-account trainer
        --image-pull-secret registry --image-pull-secret another
        --annotation k8s.v1.cni.cncf.io/networks=ib0,ib1 --annotation a/b='c=d e' --backoff-limit 5 --ttl 1-0
        --env NCCL_DEBUG=INFO --env-secret HF_TOKEN=hugging.face:to.k_en --env-secret wandb
        --container-mounts wine-data:/data,configmap/nccl:/etc/nccl,secret/keys:/keys:ro,emptydir/2T:/scratch
        --container-mounts emptydir:/tmp train.py""",
    "jobset": f"""{IMAGE} --kind jobset --nodes 2 --gpus-per-node 8 --gang volcano --ttl 1:00:00 --annotation a/b=c
        train.py""",
    "restricted": f"""{IMAGE} --nodes 2 --gpus-per-node 8 --restricted --run-as 1000:3000 --constraint 'pool=a|b'
        --image-pull-policy ifnotpresent --spread topology.kubernetes.io/zone --anti-affinity kubernetes.io/hostname
        train.py""",
    "trainjob": f"""{IMAGE} --kind trainjob --runtime torch-distributed --nodes 4 --gpus-per-node 8 --mem 200G
        --request cpu=500m --time 1:00:00 --restricted --run-as 1000 --label team=vision --env NCCL_DEBUG=INFO
        --env-secret HF_TOKEN=hugging-face:token --toleration nvidia.com/gpu --constraint pool=h100
        --image-pull-secret registry --service-account trainer --container-mounts wine-data:/data train.py""",
    "pytorchjob": f"""{IMAGE} --kind pytorchjob --nodes 4 --gpus-per-node 8 --time 1:00:00 --ttl 1-0 --backoff-limit 2
        --label team=vision --anti-affinity kubernetes.io/hostname --host-network --container-mounts wine-data:/data
        train.py""",
    "programs": f"""--command --name infer --nodes 2 --gpus-per-node 4 vllm --port {{port}}
        : --command --name Envs --nodes 1 env-server {{port}}
        : {IMAGE} --nodes 4 --gpus-per-node 8 --gang coscheduling --program-image infer=vllm/vllm-openai:v0.11
        train.py http://{{infer}}""",
    "elastic": f"{IMAGE} --nodes 2:4 --gang volcano --scheduler-name mine --grow --join-window 60 train.py",
}

NEWEST_VERSION = ".".join(kubernetes_validate.latest_version().split(".")[:2])

EACH = pytest.mark.parametrize("name", JOBS)


@pytest.fixture
def manifest(run_in_fork):
    """What ``ddplaunch manifest WORDS`` prints, of words or of a line."""

    def print_it(*words: str) -> str:
        done = run_in_fork(
            "manifest", *(shlex.split(words[0]) if len(words) == 1 else words), env={"HERE": "of this shell"}
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return print_it


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.yaml").read_text()


def read(text: str) -> list[dict[str, Any]]:
    """Both readers' idea of it, which is one."""
    old = list(pyyaml.safe_load_all(text))
    assert old == list(YAML(typ="safe", pure=True).load_all(io.StringIO(text)))
    return old


def check(each: dict[str, Any], version: str = NEWEST_VERSION) -> None:
    """Check against this very version's schema, which refuses fields that it does not know.

    Of a JobSet, whose schema is JobSet's own, these are the Jobs in it. There is no published schema of a PodGroup.
    """
    if each["kind"] == "JobSet":
        check_model("JobsetV1alpha2JobSet", each)
        for replicated in each["spec"]["replicatedJobs"]:
            check({"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}, version)
        return
    if each["kind"] == "TrainJob":
        check_model("TrainerV1alpha1TrainJob", each)
    if each["kind"] in ("PodGroup", "TrainJob"):
        return
    if each["kind"] == "PyTorchJob":  # whose schema is in the operator alone: its pods
        for replicas in each["spec"]["pytorchReplicaSpecs"].values():
            check({"apiVersion": "v1", "kind": "Pod", **replicas["template"]}, version)
        return
    assert kubernetes_validate.validate(each, version, strict=True) == version


def check_model(model: str, each: dict[str, Any]) -> None:
    """Check against a model of Kubeflow's, also that of JobSet's API; it refuses types, and drops unknown fields."""
    models = import_module("kubeflow_trainer_api.models")  # here, as it takes a second
    known = getattr(models, model).from_dict(copy.deepcopy(each))
    assert all(known.to_dict()["spec"].get(name) == value for name, value in each["spec"].items())


@EACH
def test_manifests_equal_the_golden_files(manifest, name):
    text = manifest(JOBS[name])
    assert text == golden(name)
    assert max(map(len, text.splitlines())) <= 144


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


@EACH
def test_the_schemas_of_kubernetes_take_it(name):
    first = "1.31" if name == "elastic" else "1.29"
    if name not in ("trainjob", "pytorchjob"):
        assert f"for Kubernetes {first} or newer" in golden(name)
    objects = read(golden(name))
    for version in (first, NEWEST_VERSION):
        for each in objects:
            check(each, version)


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


@pytest.mark.parametrize(
    ("kind", "label"),
    [("job", "batch.kubernetes.io/job-name"), ("jobset", "jobset.sigs.k8s.io/jobset-name")],
)
def test_restricted_pods_meet_the_standard(manifest, kind, label):
    """The pods of ``--restricted`` break no rule of the standard, and selectors match no other job's pods."""
    mounts = "sets:/sets:ro,emptydir:/tmp,configmap/nccl:/etc/nccl"
    *_, found = read(manifest(f"--kind {kind} --container-mounts {mounts} {JOBS['restricted']}"))
    check(found)
    found = found["spec"]["replicatedJobs"][0]["template"] if kind == "jobset" else found
    assert broken_rules(found) == []
    spec = found["spec"]["template"]["spec"]
    paths = [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]]
    assert paths == ["/dev/shm", "/sets", "/tmp", "/etc/nccl"]
    (spread,) = spec["topologySpreadConstraints"]
    (apart,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert spread["labelSelector"] == apart["labelSelector"] == {"matchLabels": {label: "train"}}


def test_the_container_gets_words_and_variables_unchanged(manifest):
    """Words and variables arrive unchanged, though YAML and Kubernetes read some in their own way."""
    words = [*NASTY, "$", "$$", "$$$", "$(HOME)", "$$(HOME)", "$(", "a$(b)c$d$$", "$(JOB_COMPLETION_INDEX)", "${HOME}"]
    variables = {f"V{number}": word for number, word in enumerate(words)}
    options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    (pod,) = pods(manifest(*IMAGE.split(), *options, "train.py", "--", *words))
    assert pod.words == [*launcher_command("python"), "run", "--cluster", "kubernetes", "train.py", "--", *words]
    assert {name: pod.environ[name] for name in variables} == variables


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ("--grace 0", 10), ("--grace 2.5 --preempt-grace 60", 13),
        ("--grace 5.5 --preempt-signal TERM --preempt-grace 60", 76),
    ],
)  # fmt: skip
def test_the_kubelet_waits_longer_than_the_ranks_may(manifest, options, seconds):
    (job,) = read(manifest(f"{options} {JOBS['smallest']}"))
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


def test_pods_that_the_job_controller_restarts(manifest):
    (job,) = read(golden("smallest"))
    (bound,) = read(manifest(f"--backoff-limit 0 {JOBS['smallest']}"))
    assert (bound["spec"]["backoffLimitPerIndex"], bound["spec"]["maxFailedIndexes"]) == (0, 0)
    for code, conditions, action in (
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
    ):
        assert verdict(job, code, *conditions) == action
        assert verdict(bound, code, *conditions) == ("Count" if action == "Ignore" else action)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("train.py", "train"), ("./deep/Train_Me.py", "train-me"), ("train.py:main", "train-main"),
        ("wine.train:main", "wine-train-main"), ("wine.train", "wine-train"), ("/usr/bin/echo", "echo"),
        ("3d.py", "job-3d"), ("a.pyx.python", "a-pyx-python"), ("---", "job"), ("été.py", "ete"), ("日本.py", "job"),
        ("x" * 80, "x" * 61), ("x" * 60 + "_y", "x" * 60),
    ],
)  # fmt: skip
def test_names_from_targets(target, name):
    assert derive_job_name(target, max_name_length(2)) == name


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_last_pod_has_a_name_too(manifest, kind):
    for nodes in (1, 10, 11, 101, 1000):
        last = pods(manifest(f"{IMAGE} --nodes {nodes} --kind {kind} {'y' * 99}.py"))[-1].hostname
        assert len(last) == 63
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", last)


if __name__ == "__main__":
    for each, line in JOBS.items():
        done = run_command(ddplaunch_command("manifest", *shlex.split(line)), env={"HERE": "of this shell"}, check=True)
        (GOLDEN / f"{each}.yaml").write_text(done.stdout)
