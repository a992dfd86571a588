"""Tests of what goes wrong before a job is created, while it waits and runs, and between kubectl and the API server."""

import json
import re
import signal
import time

import pytest

from ddplaunch.features.kubernetes.scheduler import MANAGED
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from tests.conftest import assert_refused, wait_until, write_program
from tests.kubernetes.api_server import Fault
from tests.kubernetes.cluster import IMAGE, SUBMIT, TWO
from tests.scaled_timeouts import scaled_timeout

pytestmark = pytest.mark.ci

TRAIN = """
import os, signal, sys, time
print("rank", os.environ["RANK"], flush=True)
number = 0
while not os.path.exists("go"):
    if os.environ["RANK"] == "0":
        print("line", number, flush=True)
        number += 1
    time.sleep(0.02)
print("end", os.environ["RANK"], flush=True)
"""


FAILS_ONCE = """
import os, sys, time
if not os.path.exists("failed"):
    open("failed", "w").close()
    print("first try", flush=True)
    sys.exit(3)
print("second try", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _train(tmp_path):
    write_program(tmp_path, "train.py", TRAIN)


FORBIDDEN = (
    'jobs.batch is forbidden: User "jane" cannot create resource "jobs" in API group "batch" in the namespace "default"'
)
QUOTA = 'jobs.batch "wine" is forbidden: exceeded quota: jobs, requested: count/jobs.batch=1, used: 4, limited: 4'
WEBHOOK = 'admission webhook "policy" denied the request: label team is missing'


@pytest.mark.parametrize(
    ("words", "fault", "message", "hint"),
    [
        (("--namespace", "nope"), None, "context test has no namespace nope", "kubectl get namespaces"),
        (("--kind", "jobset"), None, "the cluster of context test has no JobSets", "--kind job"),
        (
            (),
            Fault("POST .*jobs", 403, "Forbidden", FORBIDDEN),
            "cannot create jobs in namespace default: forbidden for jane",
            "kubectl auth can-i",
        ),
        (
            ("--nodes", "2"),
            Fault("POST .*services", 403, "Forbidden", FORBIDDEN.replace("jobs", "services")),
            "cannot create services in namespace default: forbidden for jane",
            "kubectl auth can-i",
        ),
        (
            (),
            Fault("POST", 403, "Forbidden", QUOTA),
            "the quota of namespace default does not allow wine: jobs, requested: count/jobs.batch=1, used: 4",
            "kubectl describe quota",
        ),
        ((), Fault("POST", 400, "BadRequest", WEBHOOK), f"Kubernetes rejected Job wine: {WEBHOOK}", "--dry-run"),
    ],
)
def test_what_the_api_server_refuses(user, server, words, fault, message, hint):
    server.faults += [fault] if fault else []
    done = user.type(*SUBMIT, "--job-name", "wine", "--no-unique-name", *words, "train.py")
    assert_refused(done, f"Error: {message}", hint)
    wait_until(lambda: server.objects == {}, "the removal of what was created")
    assert " ago " not in user.type("ps").stdout


def test_a_name_that_is_taken(user):
    words = (*SUBMIT, "--job-name", "wine", "--no-unique-name", "train.py")
    assert user.type(*words).returncode == 0
    assert_refused(user.type(*words), "Error: there is a Job wine in namespace default already", "--no-unique-name")
    assert user.type("stop", "wine").returncode == 0


def test_without_kubectl_and_without_a_context(user, tmp_path):
    done = user.type(*SUBMIT, "train.py", env={"PATH": str(tmp_path)})
    assert_refused(done, "Error: kubectl is not on PATH: this machine has no commands of Kubernetes", "install kubectl")
    done = user.type(*SUBMIT, "train.py", env={"KUBECONFIG": str(tmp_path / "none")})
    assert_refused(done, "Error: kubectl has no context to submit to", "kubectl config get-contexts")
    done = user.type(*SUBMIT, "--dry-run", "train.py", env={"KUBECONFIG": str(tmp_path / "none")})
    assert (done.returncode, "kind: Job" in done.stdout) == (0, True)


def test_options_of_other_schedulers_are_refused(user):
    assert_refused(user.type(*SUBMIT, "--partition", "a", "train.py"), "--partition works only with ddplaunch submit")
    assert_refused(user.type("submit", "--scheduler", "kubernetes", "train.py"), "--container-image is missing")
    assert "--toleration" in user.type("submit", "--scheduler=kubernetes", "--help").stdout
    assert "--toleration" not in user.type("submit", "--help").stdout


def test_an_image_that_cannot_be_pulled(user, server):
    """--follow names it at once and stays; without a terminal Ctrl-C leaves the job."""
    server.lost_images[IMAGE] = "rpc error: not found"
    following = user.start(*SUBMIT, *TWO, "--follow", "train.py")
    why = f"waits: cannot pull image {IMAGE}: rpc error: not found"
    wait_until(lambda: why in following.stderr(), "the reason", 15)
    number = re.findall(r"job (\S+): train.py", following.stderr())[0]
    assert user.state(number) == why
    refused = user.type("stacks", number)
    assert_refused(refused, f"Error: job {number} {why}: no rank runs")
    assert user.type("report", number).stdout == f"job {number} {why}\n"
    following.signal(signal.SIGINT)
    assert following.wait() == 130
    keeps = f"ddplaunch: job {number} keeps running; its log: ddplaunch logs {number}\n"
    assert following.stderr().endswith(keeps)
    server.lost_images.clear()
    user.wait_for(number, "rank 1")
    assert user.type("stop", number).returncode == 0


def test_too_few_gpus(user, server):
    server.nodes_with_gpus = 0
    number = user.submit("--gpus-per-node", "8", "train.py")
    wait_until(lambda: "0/8 nodes" in user.state(number), "the reason", 15)
    assert user.state(number) == "waits: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu"
    assert user.type("stop", number).returncode == 0


def numbered(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"line (\d+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("fault", ["connections", "server", "gone", "slow"])
def test_a_log_goes_on_without_a_gap_or_a_line_twice(user, server, tmp_path, fault):
    """Connections break, the API server is away, replies 410 Gone or 503, or is slow."""
    following = user.start(*SUBMIT, *TWO, "--follow", "train.py")
    following.wait_for("line 20")
    if fault == "connections":
        for _ in range(3):
            before = following.stdout().count("line")
            server.break_connections()
            wait_until(lambda before=before: following.stdout().count("line") > before + 20, "lines after the break")
    elif fault == "server":
        server.close()
        time.sleep(5)  # it is away meanwhile
        server.open()
    elif fault == "gone":
        server.faults += [Fault("GET", 410, "Expired", "too old"), Fault("GET", 503, "ServiceUnavailable", "busy")]
        server.break_connections()
        asked = len(server.requests)
        wait_until(lambda: len(server.requests) > asked + 10, "more requests")
        server.faults.clear()
    else:
        server.faults.append(Fault("GET", delay_s=1.0))
        server.break_connections()
    seen = following.stdout().count("line")
    wait_until(lambda: following.stdout().count("line") > seen + 30, "lines after it")
    server.faults.clear()
    write_program(tmp_path, "go", "")
    assert following.wait() == 0, following.stderr()
    numbers = numbered(following.stdout())
    assert numbers == list(range(len(numbers)))
    assert following.stdout().count("end ") == 2


def test_an_evicted_pod(user, server, tmp_path):
    """All pods end and start again; the log goes on with those, and shows what the first printed."""
    following = user.start(*SUBMIT, *TWO, "--follow", "train.py")
    following.wait_for("rank ", 2)
    number = re.findall(r"job (\S+): train.py", following.stderr())[0]
    (pod,) = server.list_pods(f"{number}-1-")
    server.evict(pod)
    following.wait_for("rank ", 4)
    wait_until(lambda: "is running again (restart 1)" in following.stderr(), "the restart")
    write_program(tmp_path, "go", "")
    assert following.wait() == 0, following.stderr()
    assert following.stdout().count("end ") == 2
    logs = user.type("logs", number).stdout
    assert sorted(logs.splitlines()) == sorted(following.stdout().splitlines())


def test_a_container_that_is_restarted_in_its_pod(user, server, tmp_path):
    """The operator of a PyTorchJob does that: ``logs`` shows the container before, too."""
    server.kinds.add("pytorchjobs")
    write_program(tmp_path, "train.py", FAILS_ONCE)
    kind = ("--kind", "pytorchjob", "--backoff-limit", "3", *TWO[2:])
    following = user.start(*SUBMIT, *kind, "--follow", "train.py")
    following.wait_for("second try")
    number = re.findall(r"job (\S+): train.py", following.stderr())[0]
    wait_until(lambda: user.state(number) == "is running again (restart 1)", "the restart")
    printed = user.type("logs", number).stdout
    assert printed.index("first try") < printed.index("rank 0 exited with code 3") < printed.index("second try")
    write_program(tmp_path, "go", "")
    assert following.wait() == 0, following.stderr()
    assert sorted(following.stdout().splitlines()) == sorted(user.type("logs", number).stdout.splitlines())


def test_an_outage_is_named_where_a_job_is_followed(user, server, tmp_path):
    """``wait``, ``attach`` and ``logs -f`` go on; each says once that no answer comes, and that one comes again."""
    number = user.submit("train.py")
    user.wait_for(number, "rank 0")
    followers = [user.start(*words, number) for words in (("wait",), ("attach",), ("logs", "-f"))]
    wait_until(lambda: all("line" in each.stdout() for each in followers[1:]), "output")
    server.close()
    unanswered = re.compile(rf"ddplaunch: Kubernetes has not answered for \d+ s; job {number} is not affected\n")
    wait_until(lambda: all(unanswered.search(each.stderr()) for each in followers), "the notices")
    server.open()
    wait_until(lambda: all("Kubernetes answers again\n" in each.stderr() for each in followers), "the answers")
    write_program(tmp_path, "go", "")
    assert [each.wait() for each in followers] == [0, 0, 0], [each.stderr() for each in followers]
    assert [each.stderr().count("answer") for each in followers] == [2, 2, 2]


def test_ps_while_the_api_server_is_away(user, server):
    """Jobs of its context are unknown, not forgotten."""
    number = user.submit("train.py")
    user.wait_for(number, "rank 0")
    server.close()
    assert user.state(number).startswith("is unknown: context test does not answer: ")
    stopped = user.type("stop", number)
    assert (stopped.returncode, "kubectl does not answer" in stopped.stderr) == (69, True), stopped.stderr
    server.open()
    assert "kubectl does not answer" in user.type("ps", env={"PATH": "/nowhere"}).stdout
    assert user.state(number) == "is running"
    server.faults.append(Fault("GET .*pods", 403, "Forbidden", 'pods is forbidden: User "jane" cannot list resource'))
    refused = user.type("wait", number)
    assert (refused.returncode, f"cannot see job {number} in namespace default" in refused.stderr) == (1, True)
    server.faults.clear()
    assert user.type("stop", number).returncode == 0


def test_a_job_is_found_in_its_own_context(user, server, tmp_path):
    number = user.submit("train.py")
    user.wait_for(number, "rank 0")
    server.kubeconfig("other", "test", namespace="elsewhere")
    assert user.state(number) == "is running"
    assert user.type("stop", "train").returncode == 0


def test_a_thousand_jobs_on_record(user, server, monkeypatch):
    """``ps`` asks twice for all jobs of a context, and is quick."""
    monkeypatch.setenv("XDG_STATE_HOME", user.env["XDG_STATE_HOME"])
    for number in range(1000):
        name = f"wine-{number}"
        fields = {"array": None, "cwd": "", "log": "", "run_id": name, "python": "", "image": None}
        where = {"cluster": f"{'test' if number % 2 else 'other'}/default", "scheduler": "kubernetes"}
        submitted_jobs.save_job(
            SubmittedJob(number=name, name=name, target="t.py", nodes=1, moment=time.time(), **where, **fields)
        )
        path, labels = f"/apis/batch/v1/namespaces/default/jobs/{name}", {MANAGED: "ddplaunch"}
        server.objects[path] = {"kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": {}, "status": {}}
    server.kubeconfig("test", "other")
    began, server.requests[:] = time.monotonic(), []
    shown = json.loads(user.type("ps", "--json").stdout)
    assert time.monotonic() - began < scaled_timeout(2)
    assert sum(each["state"] == "waits for its pods" for each in shown) == 1000
    assert len([each for each in server.requests if each.startswith("GET /api")]) == 4, server.requests
    server.objects.clear()
