"""Tests of commands on a job that runs: what they show comes from its pods, by ``kubectl exec``."""

import json
import os
import re
import sys

import pytest

from tests.conftest import wait_until, write_program
from tests.kubernetes.cluster import SUBMIT, TWO

pytestmark = pytest.mark.ci

TRAIN = """
import os, time
print("rank", os.environ["RANK"], flush=True)
loss = 42
if os.environ["RANK"] == "1" and os.path.exists("stop-here"):
    breakpoint()
def step():
    while not os.path.exists("go"):
        time.sleep(0.02)
step()
print("end", os.environ["RANK"], flush=True)
"""


@pytest.fixture(autouse=True)
def _train(tmp_path):
    write_program(tmp_path, "train.py", TRAIN)


def test_what_runs_where(user, tmp_path):
    """stacks, top, logs --rank and profile reach the ranks of all pods."""
    number = user.submit(*TWO, "--job-name", "wine", "train.py")
    for rank in (0, 1):
        user.wait_for(number, f"rank {rank}")
    stacks = user.type("stacks", "wine")
    assert (stacks.returncode, "ranks 0, 1" in stacks.stdout) == (0, True), stacks
    assert "step" in stacks.stdout
    hosts = json.loads(user.type("stacks", number, "--json").stdout)["ranks"]
    assert [each["rank"] for each in hosts] == [0, 1]
    top = user.type("top", number)
    assert (top.returncode, "running: 2 ranks" in top.stdout) == (0, True), top
    for rank in (0, 1):
        assert user.type("logs", number, "--rank", str(rank)).stdout == f"rank {rank}\n"
    profile = user.type("profile", number, "--seconds", "0.5")
    assert profile.returncode == 0, profile.stderr
    assert "step" in profile.stdout
    pod = rf"{number}-0-\w{{5}}"
    hint = rf"to copy a file from there: kubectl cp --context test --namespace default {pod}:FILE FILE\n"
    assert re.search(hint, profile.stderr)
    assert user.type("stacks", "nosuch").returncode == 2
    failed = user.type("logs", number, "--rank", "7")
    assert failed.returncode != 0
    assert "rank 7" in failed.stderr + failed.stdout, failed


def test_a_job_of_several_programs(user):
    """``logs --program`` asks all pods; one that no pod has is an error."""
    side = ("--command", sys.executable, "-c", "import time; print('side', flush=True); time.sleep(600)", ":")
    number = user.type("submit", *side, *SUBMIT[1:], *TWO, "train.py").stdout.partition(":")[0].removeprefix("job ")
    user.wait_for(number, "rank 1")
    (program,) = (each["program"] for each in json.loads(user.type("stacks", number, "--json").stdout)["programs"])
    wait_until(lambda: user.type("logs", number, "--program", program).stdout == "side\n", "its output")
    missing = user.type("logs", number, "--program", "nosuch")
    assert (missing.returncode, "has no program nosuch" in missing.stderr) == (2, True), missing.stderr
    assert user.type("stop", number).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give pods host names here")
def test_a_rank_is_debugged(user, tmp_path, server):
    write_program(tmp_path, "stop-here", "")
    number = user.submit(*TWO, "--debug", "train.py")
    user.wait_for(number, "is at a breakpoint")
    write_program(tmp_path, "go", "")
    debugged = user.start("debug", number, "--rank", "1", input="p loss + 1\nc\n")
    assert debugged.wait() == 0, debugged.stdout() + debugged.stderr()
    assert "43" in debugged.stdout().split(), debugged.stdout()
    assert user.type("wait", number).returncode == 0


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "pytorchjob"])
def test_other_kinds_of_jobs(user, server, kind, tmp_path):
    """submit, ps, logs, stacks, stop and wait; the number names the kind."""
    server.kinds |= {f"{kind}s"}
    done = user.type(*SUBMIT, *TWO, "--kind", kind, "--job-name", "wine", "train.py")
    assert done.returncode == 0, done.stderr
    number = re.findall(r"^job (\S+):", done.stdout)[0]
    assert number.startswith(f"{kind}/wine-")
    name = number.partition("/")[2]
    for rank in (0, 1):
        user.wait_for(name, f"rank {rank}")
    assert user.state(number) == "is running"
    assert "ranks 0, 1" in user.type("stacks", name).stdout
    asked = len(server.requests)
    waiting = user.start("wait", number)
    wait_until(lambda: len(server.requests) >= asked + 4, "its first queries")
    assert user.type("stop", number).stderr.endswith(f"job {number} was deleted (exit code 143)\n")
    assert waiting.wait() == 143
    assert server.objects == {}

    second = user.submit(*TWO, "--kind", kind, "train.py")
    write_program(tmp_path, "go", "")
    assert user.type("wait", second).stderr == f"job {second} completed (exit code 0)\n"


def test_a_jobset_of_several_programs(user, server, tmp_path):
    """The pods of the server have another image; ps, logs, stacks and wait see all pods as nodes of one job."""
    server.kinds |= {"jobsets"}
    web = ("--command", "--name", "web", "--nodes", "1", "--ready", "http:/", "python3", "-m", "http.server", "{port}")
    options = (*SUBMIT[1:], *TWO, "--program-image", "web=web:1", "--job-name", "wine", "train.py")
    done = user.type("submit", *web, ":", *options)
    assert done.returncode == 0, done.stderr
    number = re.findall(r"^job (\S+):", done.stdout)[0]
    name = number.partition("/")[2]
    user.wait_for(name, "rank 0")
    pods = sorted(server.list_pods(), key=lambda pod: pod["metadata"]["name"])
    assert [pod["spec"]["containers"][0]["image"] for pod in pods] == ["registry.example/wine:1", "web:1"]
    assert user.state(number) == "is running"
    text = user.type("stacks", name).stdout
    assert "rank 0" in text
    assert re.search(r"web: ready for", text), text
    write_program(tmp_path, "go", "")
    assert user.type("wait", number).stderr == f"job {number} completed (exit code 0)\n"
    assert "[web] Serving HTTP" in user.type("logs", name).stdout


def test_a_job_that_was_applied_by_hand(user, server, tmp_path):
    """It is not on record: it is found by its name in the current context."""
    manifest = user.type("manifest", *SUBMIT[3:], *TWO, "--job-name", "wine", "--run-id", "red", "train.py").stdout
    (tmp_path / "wine.yaml").write_text(manifest)
    server.apply(manifest)
    for rank in (0, 1):
        user.wait_for("wine", f"rank {rank}")
    assert "ranks 0, 1" in user.type("stacks", "wine").stdout
    assert "wine" not in user.type("ps").stdout
    attached = user.start("attach", "wine")
    attached.wait_for("] rank ", 2)
    stopped = user.type("stop", "wine")
    assert (stopped.returncode, stopped.stderr) == (0, "stopping job wine\njob wine was deleted (exit code 143)\n")
    assert attached.wait() == 143
    wait_until(lambda: not server.list_pods(), "the end of its pods")
    gone = user.type("stop", "wine")
    assert (gone.returncode, gone.stderr.splitlines()[0]) == (2, 'Error: no run named "wine"')
