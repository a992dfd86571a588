"""Tests of ``ddplaunch manifest``: its output, refused options, and defaults from files."""

import re
import shlex

import pytest
import yaml

from tests.conftest import assert_refused, conflict, write_program

MANIFEST = "ddplaunch manifest"

WITHOUT_SIZES = [
    "note: without --mem the pods reserve no memory: Kubernetes ends such pods first if a machine runs short",
    "note: without --cpus-per-task the pods reserve no CPUs: they get what other pods there leave",
]
"""What a dry run says of a job with the defaults."""

ASKED = "--container-image img:1"


@pytest.fixture
def call(run_in_fork, tmp_path):
    """Run ``ddplaunch WORDS`` where no target is, no Slurm and no kubectl."""
    (tmp_path / "empty").mkdir()

    def run(line: str, env: dict[str, str] | None = None):
        variables = {"PATH": str(tmp_path / "empty"), "XDG_CONFIG_HOME": str(tmp_path / "config"), **(env or {})}
        return run_in_fork(*shlex.split(line), env=variables)

    return run


@pytest.fixture
def manifest(call):
    """Run ``ddplaunch manifest WORDS`` there."""
    return lambda line, **options: call(f"manifest {line}", **options)


@pytest.fixture
def spec(manifest):
    """The Job's spec, its pods' and their container's of a command line."""

    def read(line: str, **options):
        done = manifest(f"{ASKED} {line}", **options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        job = list(yaml.safe_load_all(done.stdout))[-1]
        pod = job["spec"]["template"]["spec"]
        return job, pod, pod["containers"][0]

    return read


def test_only_the_manifest_is_printed_and_a_dry_run_shows_more(manifest):
    line = f"{ASKED} --nodes 2 --container-mounts a:/b,c:/d:ro train.py"
    done = manifest(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert [each["kind"] for each in yaml.safe_load_all(done.stdout)] == ["Service", "Job"]
    dry = manifest(f"--dry-run {line}")
    assert dry.stdout == done.stdout
    assert dry.stderr.splitlines() == [
        "nodes: 2 (--nodes)",
        "job-name: train (the target)",
        "container-image: img:1 (--container-image)",
        "container-mounts: a:/b, c:/d:ro (--container-mounts)",
        *WITHOUT_SIZES,
    ]
    sized = manifest(f"--dry-run --mem 8G --request cpu=2 {line}").stderr
    assert "note" not in sized


def test_the_manifest_is_utf8_in_any_locale(manifest):
    done = manifest(f"{ASKED} train.py -- '→ ü'", env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})
    assert '"→ ü"' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py --lr 0.1", "train.py -- --lr 0.1"),
        ("--max-restarts 2 train.py --nodes 2 -- --lr 0.1", "--max-restarts 2 train.py -- --lr 0.1"),
        ("--env A=1 --nproc 4 --label a=b --namespace n train.py", "--nproc 4 train.py"),
        ("--env=A=1 --dry-run train.py --nproc 4 a", "--nproc 4 train.py -- a"),
        ("-m --nodes 2 --grace 5 wine.train", "-m --grace 5 wine.train"),
        ("--no-python /bin/echo -n x", "--no-python /bin/echo -- -n x"),
        ("--time 3m train.py -- --time 3 --env x", "train.py -- --time 3 --env x"),
        ("--log-dir /logs --master-port 4000 train.py", "--log-dir /logs --master-port 4000 train.py"),
    ],
)
def test_which_words_are_for_run(manifest, line, words):
    done = manifest(f"{ASKED} {line}")
    job = list(yaml.safe_load_all(done.stdout))[-1]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == shlex.split(words)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400), ("1.5h", 5400), ("90:30", 5430), ("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400),
        ("1-12:30:15", 131415), ("unlimited", None), ("INFINITE", None),
    ],
)  # fmt: skip
def test_times_are_seconds(spec, text, seconds):
    job, _, _ = spec(f"--time {text} train.py")
    assert job["spec"].get("activeDeadlineSeconds") == seconds


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ("", None), ("--gpus-per-node 8", {"nvidia.com/gpu": 8}), ("--gpus-per-node 0 --mem 0", None),
        ("--cpus-per-task 1 --resource hugepages-2Mi=1G", {"cpu": 1, "hugepages-2Mi": "1Gi"}),
        ("--cpus-per-task 64 --mem 200G", {"cpu": 64, "memory": "200Gi"}), ("--mem 500", {"memory": "500Mi"}),
        ("--mem 500kb", {"memory": "500Ki"}), ("--mem 2TB", {"memory": "2Ti"}),
    ],
)  # fmt: skip
def test_gpu_options_become_resource_limits(spec, options, limits):
    _, _, container = spec(f"{options} train.py")
    assert container.get("resources") == (limits and {"limits": limits})


@pytest.mark.parametrize(("resource", "locks"), [("rdma/hca=1", True), ("a.b/efa=4", True), ("a/default=8", False)])
def test_memory_is_locked_for_rdma_alone(spec, resource, locks):
    _, _, container = spec(f"--resource {resource} train.py")
    assert ("securityContext" in container) == locks


def test_the_ports_of_a_host_are_those_that_are_typed(spec):
    _, _, container = spec("--nodes 2 --host-network --master-port 4000 --control-port 5000 train.py")
    assert [port["containerPort"] for port in container["ports"]] == [4000, 5000]
    _, pod, container = spec("--host-network train.py")
    assert (pod["hostNetwork"], "ports" in container) == (True, False)


def test_spares_are_pods_like_the_others(spec):
    job, _, container = spec("--nodes 2 --spares 1 --gang volcano train.py")
    assert (job["spec"]["completions"], job["spec"]["maxFailedIndexes"]) == (3, 1)
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert job["metadata"]["annotations"] == {"scheduling.volcano.sh/group-min-member": "2"}
    assert {"name": "DDPLAUNCH_NNODES", "value": "2:3"} in container["env"]
    assert container["args"] == ["--spares", "1", "train.py"]
    assert "successPolicy" not in spec("--nodes 2:2 train.py")[0]["spec"]


def test_a_name_of_its_own_each_time(spec):
    names = {spec("--unique-name --nodes 2 train.py")[0]["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch("train-[a-z0-9]{5}", name) for name in names)
    longest = spec(f"--unique-name --nodes 2 --job-name {'a' * 55} train.py")[0]["metadata"]["name"]
    assert len(longest) == 61


OF_TWO = "--command --name infer --nodes 2 infer-server {port} :"


@pytest.mark.parametrize(
    ("options", "kind", "gpus"),
    [
        ("", "Job", []),
        ("--gpus-per-node 4", "JobSet", [4, None]),
        ("--gpus-per-node 4 --kind job", "Job", [4]),
        ("--kind jobset", "JobSet", [None, None]),
        ("--program-image infer=vllm:1", "JobSet", [None, None]),
    ],
)
def test_a_jobset_where_the_pods_of_programs_differ(manifest, options, kind, gpus):
    *_, job = yaml.safe_load_all(manifest(f"{OF_TWO} {ASKED} --nodes 3 {options} train.py").stdout)
    assert job["kind"] == kind
    jobs = [each["template"]["spec"] for each in job["spec"].get("replicatedJobs", ())] or [job["spec"]]
    pods = [each["template"]["spec"]["containers"][0] for each in jobs]
    limits = [pod["resources"]["limits"]["nvidia.com/gpu"] if "resources" in pod else None for pod in pods]
    assert limits == (gpus or [None])
    assert sum(each["completions"] for each in jobs) == 3


TRAINJOBS = {
    "--nodes 1:2": "--nodes as a range", "--backoff-limit 0": "--backoff-limit", "--ttl 60s": "--ttl",
    "--gang volcano": "--gang", "--spread zone": "--spread", "--image-pull-policy Always": "--image-pull-policy",
    "--env-secret all": "--env-secret without a NAME",
}  # fmt: skip
"""What the runtime of a TrainJob decides, and how that is refused."""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", ("--container-image is missing", "REGISTRY/NAME:TAG")),
        (f"{ASKED}", ("the target is missing", "ddplaunch manifest train.py")),
        (f"{ASKED} --nodes 0 train.py", ("--nodes 0: expected a number",)),
        (f"{ASKED} --nodes 4:2 train.py", ("--nodes 4:2: the range is reversed", "--nodes 2:4")),
        (f"{ASKED} --program-image a=b train.py", ("--program-image a=b is for a job of several programs",)),
        (f"{OF_TWO} {ASKED} --nodes 3 --program-image infr=b train.py", ("infr=b: no program", "did you mean infer?")),
        (f"{OF_TWO} {ASKED} --nodes 3 --kind job --program-image infer=b train.py", ("one image", "--kind jobset")),
        (f"{OF_TWO} {ASKED} --nodes 2:3 --gpus-per-node 1 train.py", (conflict("--nodes 2:3", "nodes of infer"),)),
        (f"{OF_TWO} {ASKED} --nodes 3 --gpus-per-node 1 --gang volcano train.py", ("several Jobs", "coscheduling")),
        (f"{OF_TWO} {ASKED} --nodes 1 train.py", ("the programs need at least 3 nodes, and the job has 1",)),
        (f"{ASKED} --grow --nodes 2 train.py", (conflict("--grow", "--nodes 2"), "--nodes 2:3")),
        (f"{ASKED} --time 90 train.py", ("--time 90: no unit",)),
        (f"{ASKED} --nnodes 2 train.py", (conflict("--nnodes", MANIFEST), "--nodes N")),
        (f"{ASKED} --node-rank 0 train.py", (conflict("--node-rank", MANIFEST), "numbers the nodes")),
        (f"{ASKED} --token x train.py", (conflict("--token", MANIFEST), "--env-secret DDPLAUNCH_TOKEN=SECRET:KEY")),
        (f"{ASKED} --hosts a,b train.py", (conflict("--hosts", MANIFEST), "the scheduler starts the nodes, not SSH")),
        (f"{ASKED} --exclude n07 train.py", (conflict("--exclude", MANIFEST), "--constraint kubernetes.io/hostname!=")),
        (f"{ASKED} --json --dry-run train.py", (conflict("--json", MANIFEST), "the output is YAML")),
        (f"{ASKED} --partition x train.py", ("--partition works only with ddplaunch submit",)),
        (f"{ASKED} -N2 train.py", ("no such option: -N2", "did you mean -N 2?")),
        (f"{ASKED} --job-name My_Job train.py", ("My_Job: expected small", "at most 61", "--job-name my-job")),
        (f"{ASKED} --job-name '' train.py", ("--job-name has an empty value",)),
        (f"{ASKED} --nodes 101 --job-name {'a' * 60} train.py", ("at most 59\n", f"--job-name {'a' * 59}\n")),
        (f"{ASKED} --namespace a.b train.py", ("--namespace a.b: expected small letters, digits and dashes",)),
        (f"{ASKED} --label team train.py", ("--label team: expected KEY=VALUE, like team=vision",)),
        (f"{ASKED} --constraint a100 train.py", ("--constraint a100: expected KEY=VALUE, like nvidia.com/gpu.prod",)),
        (f"{ASKED} --gpus-per-node a100:8 train.py", ("does not distinguish types", "--gpus-per-node 8 --constraint")),
        ("--container-image a#b train.py", ("--container-image a#b: expected an image like nvcr.io",)),
        (f"{ASKED} --env DDPLAUNCH_TOKEN= train.py", ("--env DDPLAUNCH_TOKEN is empty",)),
        (f"{ASKED} --env 'A B=x' train.py", ("--env A B=x: expected NAME=VALUE",)),
        (f"{ASKED} --env NOT_SET_HERE train.py", ("--env NOT_SET_HERE: NOT_SET_HERE is not set here", "HERE=VALUE")),
        (f"{ASKED} --env MASTER_ADDR=x train.py", ("ddplaunch sets MASTER_ADDR in each pod", "leave it out")),
        (f"{ASKED} --container-mounts /data train.py", ("--container-mounts /data: expected SRC:DST, like my-claim",)),
        (f"{ASKED} --container-mounts a:b train.py", ("--container-mounts a:b: expected SRC:DST",)),
        (f"{ASKED} --container-mounts ./a:/b train.py", ("./a is neither an absolute path on the nodes nor", "pvc")),
        (f"{ASKED} --container-mounts a:/b,c:/b train.py", ("c:/b: a is mounted at /b already", "another DST")),
        (f"{ASKED} --container-mounts a:/dev/shm train.py", ("ddplaunch mounts memory at /dev/shm already",)),
        (f"{ASKED} --unique-name --job-name {'a' * 60} train.py", ("at most 55", f"--job-name {'a' * 55}")),
        (f"{ASKED} --kind jobset --job-name {'a' * 60} train.py", ("at most 54", f"--job-name {'a' * 54}")),
        (f"{ASKED} --kind cronjob train.py", ("--kind cronjob: expected job, jobset, trainjob or pytorchjob",)),
        *(
            (f"{ASKED} --kind pytorchjob {words} train.py", (conflict(option, "--kind pytorchjob"),))
            for words, option in {"--nodes 2:3": "--nodes as a range", "--gang volcano": "--gang",
                                  "--restricted": "--restricted"}.items()
        ),
        (f"{ASKED} --gang kueue train.py", ("--gang kueue: expected volcano or coscheduling",)),
        (f"{ASKED} --resource cpu=3 train.py", ("--resource cpu=3: cpu has its own option", "--cpus-per-task 3")),
        (f"{ASKED} --resource nvidia.com/gpu=8 train.py", ("has its own option", "--gpus-per-node 8")),
        (f"{ASKED} --resource rdma=8 train.py", ("--resource rdma=8: expected NAME=N, like rdma/hca=8", "kubectl")),
        (f"{ASKED} --resource ephemeral-storage=x train.py", ("expected a size, like ephemeral-storage=500G",)),
        (f"{ASKED} --resource a/b=1 --resource a/b=2 train.py", ("duplicate a/b", "leave one out")),
        (f"{ASKED} --resource hugepages-2Mi=1G train.py", ("only with a limit on memory or CPUs", "--mem SIZE")),
        (f"{ASKED} --request rdma/hca=1 train.py", ("--request rdma/hca=1: expected cpu=N", "equals the limit")),
        (f"{ASKED} --request cpu=1 --request cpu=2 train.py", ("duplicate cpu", "leave one out")),
        (f"{ASKED} --request cpu=x train.py", ("--request cpu=x: expected cpu=32 or cpu=500m",)),
        (f"{ASKED} --request cpu=9 --cpus-per-task 8 train.py", ("cpu=9 is more than the limit of 8", "--cpus-per")),
        (f"{ASKED} --request memory=2T --mem 9G train.py", ("memory=2Ti is more than ", "--mem")),
        (f"{ASKED} --shm-size 9G --mem 900M train.py", ("--shm-size 9Gi is more than --mem 900Mi", "raise --mem")),
        (f"{ASKED} --shm-size big train.py", ("--shm-size big: expected a size like 200G",)),
        (f"{ASKED} --toleration :NoSchedule train.py", ("expected KEY[=VALUE][:EFFECT]", "kubectl describe node")),
        (f"{ASKED} --constraint a==b train.py", ("--constraint a==b: expected KEY=VALUE", "KEY!=VALUE")),
        (f"{ASKED} --priority-class Hi train.py", ("--priority-class Hi: expected the name of a priority class",)),
        (f"{ASKED} --image-pull-secret a_b train.py", ("--image-pull-secret a_b: expected the name of a secret",)),
        (f"{ASKED} --annotation team train.py", ("--annotation team: expected KEY=VALUE, like k8s.v1",)),
        (f"{ASKED} --backoff-limit -1 train.py", ("--backoff-limit -1: expected a number, like 3",)),
        (f"{ASKED} --time 0 train.py", ("--time 0: expected a time above 0", "leave it out for a job without a limit")),
        (f"{ASKED} --runtime torch train.py", ("--runtime torch is for a TrainJob", "--kind trainjob")),
        (f"{ASKED} --runtime torch-distributed --kind job train.py",
         ("--runtime torch-distributed is for a TrainJob",)),
        *(
            (f"{ASKED} --kind trainjob {words} train.py", (conflict(option, "--kind trainjob"),))
            for words, option in TRAINJOBS.items()
        ),
        (f"{ASKED} --run-as me train.py", ("--run-as me: expected a number, or two", "id shows yours")),
        (f"{ASKED} --spread a=b train.py", ("--spread a=b: expected the key of a label",)),
        (f"{ASKED} --image-pull-policy no train.py", ("expected Always, IfNotPresent or Never",)),
        (f"{ASKED} --restricted --host-network train.py",
         ("--restricted does not allow", "--host-network")),
        (f"{ASKED} --restricted --run-as 0 train.py", ("does not allow root (--run-as 0)",)),
        (f"{ASKED} --restricted --resource a/b=1 --resource rdma/hca=8 train.py", ("(--resource rdma/hca)",)),
        (f"{ASKED} --restricted --container-mounts /d:/d train.py", ("folders of the nodes (--container-mounts /d)",)),
        (f"{ASKED} --ttl 0 train.py", ("--ttl 0: expected a time above 0", "leave it out to keep the job")),
        (f"{ASKED} --env-secret A=b train.py", ("--env-secret A=b: expected SECRET", "NAME=SECRET:KEY")),
        (f"{ASKED} --env-secret MASTER_ADDR=a:b train.py", ("ddplaunch sets MASTER_ADDR in each pod",)),
        (f"{ASKED} --env A=1 --env-secret A=b:c train.py", ("--env-secret A=b:c: --env also sets A",)),
        (f"{ASKED} --container-mounts emptydir/x:/b train.py", ("emptydir/x is neither ",)),
        (f"{ASKED} train.py --lr 1 --namespace x", ("--namespace could be", "-- --lr 1 --namespace x")),
        *((f"{ASKED} {option} '{value}' train.py", (f"{value}: expected {expected}",)) for option, value, expected in (
            ("--nodes", "2:", "a number of nodes"), ("--gpus-per-node", "x", "a number of GPUs, like 8"),
            ("--job-name", "3d", "small letters, digits and dashes, a letter first"), ("--job-name", "a-", "small"),
            ("--label", "a=b c", "KEY=VALUE"), ("--toleration", "a:Never", "KEY[=VALUE][:EFFECT]"),
            ("--resource", "a/b=0", "NAME=N"), ("--env-secret", "A_B", "SECRET"), ("--env", "=x", "NAME=VALUE"),
            ("--container-mounts", "a:/b:z", "SRC:DST"), ("--container-mounts", "a:/b:ro:c", "SRC:DST"),
            ("--ttl", "unlimited", "a time above 0"),
        )),
    ],
)  # fmt: skip
def test_refused(manifest, line, expected):
    assert_refused(manifest(line), *expected)


def test_bytes_that_are_not_text(manifest):
    assert_refused(manifest(f"{ASKED} train.py -- \udcff"), "a manifest cannot hold")


PROJECT = """
[tool.ddplaunch.manifest]
container-image = "img:1"
env = ["NCCL_DEBUG=INFO"]
label = "team=wine"
nodes = 2

[tool.ddplaunch.submit]
partition = "general"
nodes = 7
"""


def test_defaults_of_a_project_and_of_a_user(manifest, tmp_path):
    project = write_program(tmp_path, "pyproject.toml", PROJECT)
    user = write_program(tmp_path, "config/ddplaunch.toml", '[manifest]\nnamespace = "me"\nnodes = 3\n')
    done = manifest("train.py")
    assert done.returncode == 0
    job = list(yaml.safe_load_all(done.stdout))[-1]
    assert (job["metadata"]["namespace"], job["metadata"]["labels"]["team"]) == ("me", "wine")
    assert job["spec"]["completions"] == 2
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in job["spec"]["template"]["spec"]["containers"][0]["env"]
    expected = [
        f"nodes: 2 ({project})",
        f"namespace: me ({user})",
        f"label: team=wine ({project})",
        f"container-image: img:1 ({project})",
        f"env: NCCL_DEBUG=INFO ({project})",
    ]
    assert done.stderr.splitlines() == [f"ddplaunch: {line}" for line in expected]
    dry = manifest("--dry-run --nodes 4 train.py")
    assert dry.stderr.splitlines() == [
        "nodes: 4 (--nodes)",
        expected[1],
        "job-name: train (the target)",
        *expected[2:],
        *WITHOUT_SIZES,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job-name = 'A B'\n", "--job-name A B: expected small letters"),
        ("constraint = 'big'\n", "--constraint big: expected KEY=VALUE, like nvidia.com"),
        ("env = ['?']\n", "--env ?: expected NAME=VALUE"),
        ("container-image = ' '\n", "--container-image  : expected an image"),
        ("partition = 'a'\n", "unknown key partition in [manifest]\n  it belongs in [submit]"),
        ("dry-run = true\n", "unknown key dry-run in [manifest]"),
    ],
)
def test_a_file_that_makes_no_sense(manifest, tmp_path, text, expected):
    image = "" if "container-image" in text else "container-image = 'img:1'\n"
    file = write_program(tmp_path, "config/ddplaunch.toml", f"[manifest]\n{text}{image}")
    assert_refused(manifest("train.py"), expected, str(file))


SUBMIT_IS_FOR = (
    "submit is for Slurm (slurm), Grid Engine (sge), PBS (pbs), LSF (lsf), this machine (local), "
    "Kubernetes (kubernetes)"
)


@pytest.mark.parametrize(
    ("line", "file", "expected"),
    [
        ("--scheduler kubernetes", "", "--container-image is missing: a pod runs in an image\n"),
        (
            "",
            "[submit]\nscheduler = 'kubernetes'\n",
            "kubernetes: it has options of its own (FILE)\n  type it: --scheduler",
        ),
        ("--scheduler k8s", "", f"--scheduler k8s: {SUBMIT_IS_FOR}\n"),
        ("", "[submit]\nnamespace = 'me'\n", "unknown key namespace in [submit]\n  it belongs in [manifest]"),
        ("--namespace me", "", "--namespace works only with ddplaunch manifest\n  leave it out"),
    ],
)
def test_submit_points_to_manifest_for_kubernetes(call, tmp_path, line, file, expected):
    path = write_program(tmp_path, "config/ddplaunch.toml", file)
    assert_refused(call(f"submit {line} train.py"), expected.replace("FILE", str(path)))
