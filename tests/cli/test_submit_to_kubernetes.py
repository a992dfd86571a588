"""``ddplaunch submit --scheduler kubernetes``: what is printed, what is refused, and which defaults are heard."""

from __future__ import annotations

import shlex

import pytest
import yaml

from ddplaunch.cli.submit_options import NAMES, REFUSED, SECTIONS
from tests.conftest import write

ASKED = "--scheduler kubernetes --container-image img:1"


@pytest.fixture
def submit(answer, tmp_path):
    """Run ``ddplaunch submit WORDS`` where no target is, no Slurm and no kubectl."""
    (tmp_path / "empty").mkdir()

    def run(line: str, env: dict[str, str] | None = None):
        variables = {"PATH": str(tmp_path / "empty"), "XDG_CONFIG_HOME": str(tmp_path / "config"), **(env or {})}
        return answer("submit", *shlex.split(line), env=variables)

    return run


@pytest.fixture
def spec(submit):
    """The Job's spec, its pods' and their container's of a command line."""

    def read(line: str, **options):
        done = submit(f"{ASKED} {line}", **options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        job = list(yaml.safe_load_all(done.stdout))[-1]
        pod = job["spec"]["template"]["spec"]
        return job, pod, pod["containers"][0]

    return read


def test_only_the_manifest_is_printed_and_a_dry_run_tells_more(submit):
    done = submit(f"{ASKED} --nodes 2 train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert [each["kind"] for each in yaml.safe_load_all(done.stdout)] == ["Service", "Job"]
    dry = submit(f"{ASKED} --dry-run --nodes 2 train.py")
    assert dry.stdout == done.stdout
    assert dry.stderr.splitlines() == [
        "scheduler: kubernetes (--scheduler)",
        "nodes: 2 (--nodes)",
        "job-name: train (the target)",
        "container-image: img:1 (--container-image)",
    ]


def test_it_is_utf8_wherever_it_is_printed(submit):
    done = submit(f"{ASKED} train.py -- '→ ü'", env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})
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
        ("--time 3 train.py -- --time 3 --env x", "train.py -- --time 3 --env x"),
        ("--log-dir /logs --master-port 4000 train.py", "--log-dir /logs --master-port 4000 train.py"),
    ],
)
def test_which_words_are_for_run(submit, line, words):
    done = submit(f"{ASKED} {line}")
    job = list(yaml.safe_load_all(done.stdout))[-1]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == shlex.split(words)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400),
        ("1-12:30:15", 131415), ("unlimited", None), ("INFINITE", None), ("0", None), ("0-0", None),
    ],
)  # fmt: skip
def test_times_are_seconds(spec, text, seconds):
    job, _, _ = spec(f"--time {text} train.py")
    assert job["spec"].get("activeDeadlineSeconds") == seconds


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ("", None),
        ("--gpus-per-node 8", {"nvidia.com/gpu": 8}),
        ("--gpus-per-node 0 --mem 0", None),
        ("--cpus-per-task 64 --mem 200G", {"cpu": 64, "memory": "200Gi"}),
        ("--mem 500", {"memory": "500Mi"}),
        ("--mem 500kb", {"memory": "500Ki"}),
        ("--mem 2TB", {"memory": "2Ti"}),
    ],
)
def test_resources(spec, options, limits):
    _, _, container = spec(f"{options} train.py")
    assert container.get("resources") == (limits and {"limits": limits})


def test_where_it_runs_and_with_what(spec):
    line = (
        "--namespace vision --label team=wine --label a/b= --constraint a.b/c=d,e=f --grace 60 --job-name my-job "
        "--env A=1=2 --env HERE --env EMPTY= --container-mounts claim:/sets:ro,/d:/d --container-mounts x:/y:rw t.py"
    )
    job, pod, container = spec(line, env={"HERE": "of this shell"})
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("my-job", "vision")
    labels = {"app.kubernetes.io/managed-by": "ddplaunch", "team": "wine", "a/b": ""}
    assert job["metadata"]["labels"] == job["spec"]["template"]["metadata"]["labels"] == labels
    assert pod["nodeSelector"] == {"a.b/c": "d", "e": "f"}
    assert pod["terminationGracePeriodSeconds"] == 70
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables == {"A": "1=2", "HERE": "of this shell", "EMPTY": "", "DDPLAUNCH_NNODES": "1"}
    assert container["volumeMounts"][1:] == [
        {"name": "mount-1", "mountPath": "/sets", "readOnly": True},
        {"name": "mount-2", "mountPath": "/d"},
        {"name": "mount-3", "mountPath": "/y"},
    ]
    assert pod["volumes"][1:] == [
        {"name": "mount-1", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "mount-2", "hostPath": {"path": "/d"}},
        {"name": "mount-3", "persistentVolumeClaim": {"claimName": "x"}},
    ]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--scheduler kubernetes train.py", ("--container-image is missing", "REGISTRY/NAME:TAG")),
        ("--scheduler k8s train.py", ("'k8s' is not one of 'slurm', 'kubernetes'",)),
        (f"{ASKED}", ("the target is missing", "ddplaunch submit train.py")),
        (f"{ASKED} --nodes 0 train.py", ("--nodes 0 is no number of nodes",)),
        (f"{ASKED} --time 4h train.py", ("--time 4h is no time",)),
        (f"{ASKED} --partition x train.py", ("--partition is not for a job of Kubernetes", "--constraint KEY=VALUE")),
        (f"{ASKED} --qos=x train.py", ("--qos is not for a job of Kubernetes", "priorityClassName")),
        (f"{ASKED} --array 0-3 train.py", ("--array is not for a job of Kubernetes", "one job for each")),
        (f"{ASKED} --setup 'module load x' train.py", ("--setup is not for", "in its image")),
        (f"{ASKED} --follow train.py", ("--follow is not for", "kubectl logs --follow")),
        (f"{ASKED} --nnodes 2 train.py", ("--nnodes is not for a job of Kubernetes", "--nodes N")),
        (f"{ASKED} --node-rank 0 train.py", ("--node-rank is not for", "Kubernetes numbers the nodes")),
        (f"{ASKED} --token x train.py", ("--token is not for a job of Kubernetes", "--env DDPLAUNCH_TOKEN=SECRET")),
        (
            f"{ASKED} --hosts a,b train.py",
            ("--hosts is not for a job of Kubernetes", "Kubernetes starts the nodes, not SSH"),
        ),
        (f"{ASKED} --json --dry-run train.py", ("--json is not for a job of Kubernetes", "YAML is printed")),
        ("--namespace x train.py", ("--namespace is not for a job of Slurm", "add --scheduler kubernetes")),
        ("--hosts a,b train.py", ("--hosts is not for a job of Slurm", "Slurm starts the nodes, not SSH")),
        ("--env A=1 train.py", ("--env is not for a job of Slurm", "export it")),
        ("--label a=b --scheduler=slurm train.py", ("--label is not for a job of Slurm",)),
        (f"{ASKED} --job-name My_Job train.py", ("My_Job is no name in Kubernetes", "at most 61", "--job-name my-job")),
        (f"{ASKED} --job-name 3d train.py", ("3d is no name", "the first a letter", "--job-name job-3d")),
        (f"{ASKED} --job-name a- train.py", ("a- is no name in Kubernetes", "--job-name a")),
        (f"{ASKED} --job-name '' train.py", ("--job-name has an empty value",)),
        (f"{ASKED} --nodes 101 --job-name {'a' * 60} train.py", ("at most 59,", f"--job-name {'a' * 59}\n")),
        (f"{ASKED} --namespace a.b train.py", ("--namespace a.b is no name of one", "kubectl get ns")),
        (f"{ASKED} --label team train.py", ("--label team is no label", "like team=vision")),
        (f"{ASKED} --label 'a=b c' train.py", ("--label a=b c is no label",)),
        (
            f"{ASKED} --constraint a100 train.py",
            ("--constraint a100 is no label", "KEY=VALUE, like nvidia.com/gpu.prod"),
        ),
        (f"{ASKED} --gpus-per-node a100:8 train.py", ("Kubernetes counts GPUs", "--gpus-per-node 8 --constraint")),
        ("--scheduler kubernetes --container-image a#b train.py", ("--container-image a#b is no image",)),
        (f"{ASKED} --env DDPLAUNCH_TOKEN= train.py", ("--env DDPLAUNCH_TOKEN is empty",)),
        (f"{ASKED} --env =x train.py", ("--env =x names no variable", "NAME=VALUE")),
        (f"{ASKED} --env 'A B=x' train.py", ("--env A B=x names no variable",)),
        (f"{ASKED} --env NOT_SET_HERE train.py", ("--env NOT_SET_HERE: it is not set here", "NOT_SET_HERE=VALUE")),
        (f"{ASKED} --env MASTER_ADDR=x train.py", ("MASTER_ADDR tells a pod its place", "leave it out")),
        (f"{ASKED} --container-mounts /data train.py", ("--container-mounts /data is no SRC:DST", "my-claim:/data")),
        (f"{ASKED} --container-mounts a:b train.py", ("--container-mounts a:b is no SRC:DST",)),
        (f"{ASKED} --container-mounts a:/b:z train.py", ("a:/b:z is no SRC:DST",)),
        (f"{ASKED} --container-mounts a:/b:ro:c train.py", ("a:/b:ro:c is no SRC:DST",)),
        (f"{ASKED} --container-mounts ./a:/b train.py", ("./a is neither a path from / of the machines nor a claim",)),
        (f"{ASKED} --container-mounts a:/b,c:/b train.py", ("c:/b: /b is that of a already", "another place")),
        (f"{ASKED} --container-mounts a:/dev/shm train.py", ("/dev/shm is ddplaunch's own",)),
        (f"{ASKED} train.py --lr 1 --namespace x", ("--namespace could be", "-- --lr 1 --namespace x")),
    ],
)
def test_refused(submit, line, said):
    done = submit(line)
    assert done.returncode == 2, done
    assert done.stdout == ""
    for part in said:
        assert part in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_bytes_that_are_no_text(submit):
    done = submit(f"{ASKED} train.py -- \udcff")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot stand in a manifest" in done.stderr


def test_every_option_is_of_one_scheduler_or_of_both(submit):
    """What is refused for one is an option; what stands under a heading of one alone is refused for the other."""
    for alone, other in (("Slurm", "kubernetes"), ("Kubernetes", "slurm")):
        for option in SECTIONS[f"What {alone} alone is asked for"]:
            assert option in REFUSED[other]
            done = submit(f"--scheduler {other} {option}=x train.py")
            assert (done.returncode, done.stdout) == (2, "")
            assert f"{option} is not for a job of" in done.stderr
    assert not {"--nodes", "--time", "--scheduler"} & {*REFUSED["slurm"], *REFUSED["kubernetes"]}
    assert "--no-follow" in NAMES - set(REFUSED["kubernetes"]), "it says what is so anyway"


# --------------------------------------------------------------------------------------------------------- defaults


def test_defaults_of_a_project_and_of_a_user(submit, tmp_path):
    project = write(
        tmp_path,
        "pyproject.toml",
        """
        [tool.ddplaunch.submit]
        scheduler = "kubernetes"
        container-image = "img:1"
        partition = "general"
        follow = true
        env = ["NCCL_DEBUG=INFO"]
        label = "team=wine"
        nodes = 2
        """,
    )
    user = write(tmp_path, "config/ddplaunch.toml", '[submit]\nnamespace = "me"\nsetup = "env.sh"\n')
    done = submit("train.py")
    assert done.returncode == 0
    job = list(yaml.safe_load_all(done.stdout))[-1]
    assert (job["metadata"]["namespace"], job["metadata"]["labels"]["team"]) == ("me", "wine")
    assert job["spec"]["completions"] == 2
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in job["spec"]["template"]["spec"]["containers"][0]["env"]
    unheard = [
        f"--partition is not for a job of Kubernetes, and not heard ({project})",
        f"--follow is not for a job of Kubernetes, and not heard ({project})",
        f"--setup is not for a job of Kubernetes, and not heard ({user})",
    ]
    heard = ["container-image: img:1", "nodes: 2", "env: NCCL_DEBUG=INFO", "label: team=wine", "scheduler: kubernetes"]
    said = [*unheard, *(f"{line} ({project})" for line in heard), f"namespace: me ({user})"]
    assert sorted(done.stderr.splitlines()) == sorted(f"ddplaunch: {line}" for line in said)
    dry = submit("--dry-run train.py")
    assert dry.stdout == done.stdout
    assert {f"note: {line}" for line in unheard} < set(dry.stderr.splitlines())
    assert f"scheduler: kubernetes ({project})" in dry.stderr.splitlines()
    assert f"namespace: me ({user})" in dry.stderr.splitlines()
    assert "partition: general" not in dry.stderr


def test_what_is_typed_goes_before_a_scheduler_of_a_file(submit, tmp_path):
    write(tmp_path, "train.py", "")
    file = write(
        tmp_path, "config/ddplaunch.toml", "[submit]\nscheduler = 'kubernetes'\nnamespace = 'me'\nenv = 'A=1'\n"
    )
    done = submit("--scheduler slurm --partition x --dry-run train.py")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=x\n" in done.stdout
    assert f"note: --namespace is not for a job of Slurm, and not heard ({file})" in done.stderr.splitlines()
    assert f"note: --env is not for a job of Slurm, and not heard ({file})" in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scheduler = 'k8s'\n", "'k8s' is not one of"),
        ("scheduler = 'kubernetes'\njob-name = 'A B'\n", "--job-name A B is no name in Kubernetes"),
        ("scheduler = 'kubernetes'\nconstraint = 'big'\n", "--constraint big is no label (FILE)"),
        ("scheduler = 'kubernetes'\nenv = ['?']\n", "--env ? names no variable (FILE)"),
        ("scheduler = 'kubernetes'\ncontainer-image = ' '\n", "--container-image   is no image (FILE)"),
    ],
)
def test_a_file_that_makes_no_sense(submit, tmp_path, text, said):
    image = "" if "container-image" in text else "container-image = 'img:1'\n"
    file = write(tmp_path, "config/ddplaunch.toml", f"[submit]\n{text}{image}")
    done = submit("train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert said.replace("FILE", str(file)) in done.stderr
