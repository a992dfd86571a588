"""Tests of ``ddplaunch submit --scheduler kubernetes`` with a real kubectl: from the command line to the exit code."""

import json
import re

import pytest

from tests.conftest import wait_until, write_program
from tests.kubernetes.cluster import SUBMIT, TWO

pytestmark = pytest.mark.ci

TRAIN = """
import os, signal, sys, time

def save(*_):
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
open(f"began-{os.environ['RANK']}", "w").close()
while not os.path.exists("began-0") or ("wait" in sys.argv and not os.path.exists("go")):
    time.sleep(0.02)
print("end", os.environ["RANK"], flush=True)
sys.exit(int(sys.argv[1]) if sys.argv[1:2] != ["wait"] and sys.argv[1:] and os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture(autouse=True)
def _train(tmp_path):
    write_program(tmp_path, "train.py", TRAIN)


def test_a_job_from_its_submission_to_its_report(user, server, tmp_path):
    """submit, ps, logs, attach, wait, report, and stop of a job that has ended."""
    done = user.type(*SUBMIT, *TWO, "--job-name", "wine", "train.py", "--", "wait")
    assert done.returncode == 0, done.stderr
    number = re.findall(r"^job (\S+):", done.stdout)[0]
    assert re.fullmatch(r"wine-\w{5}", number)
    assert done.stdout.splitlines() == [
        f"job {number}: train.py on 2 nodes",
        "cluster: context test, namespace default",
        f"follow: ddplaunch attach {number}",
        f"cancel: ddplaunch stop {number}",
    ]
    user.wait_for(number, "rank 0 of 2 wait")
    user.wait_for(number, "rank 1 of 2 wait")
    assert user.state(number) == "is running"
    shown = next(each for each in json.loads(user.type("ps", "--json").stdout) if each["run"] == number)
    assert (shown["world_size"], shown["target"], shown["code"]) == (2, "train.py wait", None)
    assert f"{number}: running" in user.type("report", "wine").stdout

    following, waiting = user.start("attach", "wine"), user.start("wait", number)
    following.wait_for("] rank ", 2)
    write_program(tmp_path, "go", "")
    assert (following.wait(), waiting.wait()) == (0, 0), following.stderr()
    for text in ("rank 0 of 2 wait", "rank 1 of 2 wait", "end 0", "end 1"):
        assert following.stdout().count(text) == 1
    assert following.stderr().endswith(f"ddplaunch: job {number} completed (exit code 0)\n")
    assert waiting.stderr() == f"job {number} completed (exit code 0)\n"
    assert user.state(number) == "completed (exit code 0)"
    assert sorted(user.type("logs", number).stdout.splitlines()) == sorted(following.stdout().splitlines())
    assert user.type("report", number).stdout == f"job {number} completed (exit code 0)\n"
    stopped = user.type("stop", number)
    assert (stopped.returncode, stopped.stderr.splitlines()[0]) == (2, f"Error: job {number} completed (exit code 0)")


@pytest.mark.parametrize("code", [0, 3, 124, 137])
def test_the_exit_code_is_that_of_node_zero(user, server, code):
    """It is followed from before the pods exist; after the job was deleted, the record has its end."""
    following = user.start(*SUBMIT, *TWO, "--follow", "train.py", "--", str(code))
    assert following.wait() == code, following.stderr()
    lines = following.stdout().splitlines()
    assert {"[0] rank 0 of 2 " + str(code), "[1] rank 1 of 2 " + str(code)} <= {*lines}
    number = re.findall(r"job (\S+): train.py", following.stderr())[0]
    words = "completed" if code == 0 else "failed"
    assert following.stderr().endswith(f"job {number} {words} (exit code {code})\n")
    server.delete(f"/apis/batch/v1/namespaces/default/jobs/{number}")
    wait_until(lambda: not server.list_pods(), "the end of its pods")
    assert user.type("wait", "train").returncode == code
    report = user.type("report", number).stdout
    assert report.startswith(f"job {number} {words} (exit code {code})")
    assert ("rank 1 exited with code" in report) == (code != 0)
    gone = user.type("logs", number)
    assert (gone.returncode, gone.stderr.splitlines()[0]) == (
        1,
        f"Error: no log of job {number}: it has no pods, or no longer",
    )


def test_stop_lets_the_ranks_save_and_removes_all_objects(user, server):
    number = user.submit(*TWO, "train.py", "--", "wait")
    user.wait_for(number, "rank 0 of 2")
    user.wait_for(number, "rank 1 of 2")
    following = user.start("logs", "-f", number)
    following.wait_for("] rank ", 2)
    stopped = user.type("stop", number)
    assert (stopped.returncode, stopped.stderr) == (
        0,
        f"stopping job {number}\njob {number} was deleted (exit code 143)\n",
    )
    assert following.wait() == 0
    assert following.stdout().count("saved") == 2, following.stdout()
    assert server.objects == {}
    assert user.type("wait", number).returncode == 143
