"""Tests of ``ddplaunch submit --scheduler sge`` with a real qsub: from the login host to the exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import write_program
from tests.features.submit.states import DELETED, HELD
from tests.slurm.test_attach import Login
from tests.slurm.test_submit import number_of
from tests.start_modes import LIGHT
from tests.tools.gridengine import GridEngine, unsupported
from tests.tools.virtual_hosts.host import finish
from tests.tools.virtual_hosts.network import Network

pytestmark = pytest.mark.ci

PROGRAM = """
import os, sys, time
from ddplaunch import runtime
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
while "make-room" in sys.argv and not runtime.preempted():
    time.sleep(0.05)
while "go" in sys.argv and not os.path.exists("go"):
    time.sleep(0.05)
if "fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(7)
"""


@pytest.fixture(scope="module")
def _standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    if reason := unsupported():
        pytest.skip(f"NO GRID ENGINE HERE: {reason}")
    with Network(4) as network, GridEngine(network, tmp_path_factory.mktemp("sge")) as cluster:
        yield cluster


@pytest.fixture
def at(_standing: GridEngine, tmp_path: Path) -> Iterator[Login]:
    """The login host of three compute nodes, idle, that tests use one after the other."""
    _standing.folder = tmp_path
    yield Login(_standing, tmp_path / "state")
    _standing.run("qdel", "-u", "*", check=False)
    for node in _standing.nodes:
        if not node.alive:
            node.boot()
            _standing.start_nodes([node])
    _standing.wait_until(lambda: not _standing.run("qstat", "-u", "*"), "an empty queue")


SUBMIT = ("submit", "--scheduler", "sge", "--nodes", "2", "--nproc", "2", *LIGHT, "--pe")
"""For two nodes of two ranks."""

FOLLOW = (SUBMIT[0], "--follow", *SUBMIT[1:], "spread")


def wait_for_ranks(at: Login, job: object, text: str = "] rank") -> Path:
    """Wait until all ranks of a job have written a text; return its log."""
    log = at.cluster.folder / f"sge-{job}.out"
    at.cluster.wait_until(lambda: log.exists() and log.read_text().count(text) == 4, f"four of {text!r}")
    return log


def test_jobs_on_two_nodes_are_followed_to_their_ends(at, tmp_path):
    at.cluster.folder = write_program(tmp_path, "a job/train.py", PROGRAM).parent
    _, out, err = at.type(*FOLLOW, "train.py", "--", 'it\'s "one"', "$HOME")
    (first,) = re.findall(r"sge: this is node 0 of 2, at (n[123]) \(JOB_ID, DDPLAUNCH_HOSTS, DDPLAUNCH_NODE_RANK;", out)
    ranks = re.findall(r'(?m)^(\[(\d)\] rank \2 of 4) on (n[123]) it\'s "one" \$HOME$', out)
    hosts = [host for _, _, host in sorted(ranks)]
    assert hosts[0] == hosts[1] == first != hosts[2] == hosts[3], out + err
    assert "completed (exit code 0)" in err

    code, out, err = at.type(*FOLLOW, "train.py", "fail")
    assert code == 7, out + err
    assert out.count("ddplaunch: rank 3 exited with code 7") == 1, "one report for all nodes"

    code, out, err = at.type(*FOLLOW[:-1], "packed", "train.py")
    assert code == 2, out + err
    assert "--nodes 2 needs 2 hosts, but packed gave 2 slots on: n" in out


def test_a_deleted_job_is_stopped_on_all_nodes(at, tmp_path):
    write_program(tmp_path, "train.py", PROGRAM)
    following = at.start(*FOLLOW, "train.py", "wait")
    number = number_of(following)
    wait_for_ranks(at, number)
    at.cluster.run("qdel", str(number))
    _, err = finish(following, 137)
    assert f"job {number} was killed by signal 9 (exit code 137)" in err
    for host in at.cluster.nodes:
        at.cluster.wait_until(lambda host=host: not host.find("train.py"), f"{host.name} to have no rank")


NOTIFIED = """
import os, signal, time

from ddplaunch import runtime

got = []
for number in (signal.SIGUSR1, signal.SIGCONT):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
while not runtime.preempted():
    while got:
        print("got", got.pop(), flush=True)
    time.sleep(0.02)
print("saved", flush=True)
"""


def test_a_job_that_is_notified_saves(at, tmp_path):
    """Before it is suspended Grid Engine sends SIGUSR1, before it is deleted SIGUSR2, to each process on all hosts."""
    write_program(tmp_path, "train.py", NOTIFIED)
    following = at.start(*FOLLOW, "--qsub-arg=-notify", "train.py")
    number = number_of(following)
    log = wait_for_ranks(at, number, "ready")
    at.cluster.run("qmod", "-sj", str(number))
    at.cluster.wait_until(lambda: log.read_text().count("got 10") == 4, "the notice of a suspension")
    at.cluster.run("qmod", "-usj", str(number))
    at.cluster.wait_until(lambda: log.read_text().count("got 18") == 4, "its end")
    at.cluster.run("qdel", str(number))
    out, _ = finish(following, 75)
    assert [out.count(expected) for expected in ("got 10", "got 18", "saved")] == [4, 4, 4]
    for host in at.cluster.nodes:
        at.cluster.wait_until(lambda host=host: not host.find("train.py"), f"{host.name} to have no rank")


def test_jobs_are_listed_in_another_shell(at, tmp_path):
    """One runs to its end, and one is deleted while it waits, of which Grid Engine keeps nothing."""

    def states() -> list[str]:
        jobs = at.type("ps")[1].partition("JOB ")[2].partition("\n\n")[0]
        return [line.partition(" train.py go fail ")[2].strip() for line in jobs.splitlines()[1:]]

    write_program(tmp_path, "train.py", PROGRAM)
    _, out, err = at.type(*SUBMIT, "spread", "train.py", "go", "fail")
    number = re.findall(r"^job (\d+):", out)[0]
    assert out.splitlines()[-2:] == [f"follow: ddplaunch attach {number}", f"cancel: ddplaunch stop {number}"], err
    log = wait_for_ranks(at, number)
    assert at.type(*SUBMIT, "spread", "--qsub-arg=-h", "--job-name", "held", "train.py", "go", "fail")[0] == 0
    assert states() == [HELD, "running"]
    assert at.type("logs", number)[1] == log.read_text()
    refused = at.type("stacks", number)[2]
    assert f"executing task of job {number} failed" in refused
    assert "each host needs a free slot for it: submit with --cpus-per-task 2 or more" in refused

    attached = at.start("attach", number)
    assert attached.stdout is not None
    while "] rank" not in attached.stdout.readline():
        pass
    write_program(tmp_path, "go", "")
    out, err = finish(attached, 7)
    assert "ddplaunch: rank 3 exited with code 7" in out
    assert err.splitlines()[-1] == f"ddplaunch: job {number} failed (exit code 7)"

    code, _, err = at.type("stop", "held")
    assert (code, err.splitlines()[-1].partition(" was ")[2]) == (0, "deleted before it began (exit code 143)"), err
    assert states() == [DELETED, "failed (exit code 7)"]
    assert at.type("attach", number)[0] == 7


def test_an_array_whose_nodes_are_asked(at, tmp_path):
    """Where a host has a slot left, Grid Engine starts a look there from outside; index 1 fails, and 3 is stopped."""
    write_program(tmp_path, "train.py", PROGRAM.replace('"wait" in', 'os.environ["SGE_TASK_ID"] == "3" and "wait" in'))
    words = (*SUBMIT, "pairs", "--cpus-per-task", "2", "--array", "1-3:2", "train.py", "fail", "wait")
    code, out, err = at.type(*words)
    assert code == 0, err
    number = re.findall(r"^job (\d+):", out)[0]
    assert f"follow: ddplaunch attach {number}_INDEX" in out
    wait_for_ranks(at, f"{number}.3")
    code, out, err = at.type("stacks", f"{number}_3")
    assert code == 0, err
    assert "train.py" in out
    assert "ranks 0 to 3" in out, "those of both nodes"
    code, out, err = at.type("logs", f"{number}_3", "--rank", "0,3")
    assert (code, sorted(line[:13] for line in out.splitlines())) == (0, ["[0] rank 0 of", "[3] rank 3 of"]), err
    assert f"{number}_3: running" in at.type("report", f"{number}_3")[1]

    code, _, err = at.type("attach", f"{number}_1")
    assert (code, err.splitlines()[-1]) == (7, f"ddplaunch: job {number}_1 failed (exit code 7)"), err
    assert "1 failed, 1 running" in at.type("ps")[1]
    code, _, err = at.type("stop", f"{number}_3")
    assert (code, err.splitlines()[-1]) == (0, f"job {number}_3 was killed by signal 9 (exit code 137)"), err
    code, out, err = at.type("report", number)
    assert (code, out.splitlines()[0]) == (0, f"job {number}, array 1-3:2: 2 failed"), err


def test_a_job_is_requeued_before_its_time_is_up(at, tmp_path):
    """Once; then the time is up again. Grid Engine does not give it its second host again, so there is a third."""
    write_program(tmp_path, "train.py", PROGRAM)
    times = ("--time", "0:00:16", "--preempt-grace", "5", "--grace", "5", "--requeue", "1")
    following = at.start(*FOLLOW, *times, "train.py", "make-room")
    out, _ = finish(following, 75)
    assert out.count("to save a checkpoint") == 2, out
    assert out.count("] rank 3 of 4") == 2, out
    assert "ddplaunch: requeueing, 1 of 1\n" in out
    assert "not requeued again: --requeue 1\n" in out
    assert not list(tmp_path.glob(".ddplaunch-requeue*"))


def test_a_spare_takes_the_place_of_a_node_that_lost_power(at, tmp_path):
    """Node 0 is on the host of the script: the job would end with it."""
    write_program(tmp_path, "train.py", PROGRAM)
    words = ("--spares", "1", "--heartbeat-timeout", "4", "--join-timeout", "60", "train.py", "go")
    following = at.start(*FOLLOW, *words)
    number = number_of(following)
    log = wait_for_ranks(at, number)
    lost = re.findall(r"\[2\] rank 2 of 4 on (n\d)", log.read_text())[0]
    next(host for host in at.cluster.nodes if host.name == lost).power_off()
    at.cluster.wait_until(lambda: log.read_text().count("] rank") == 8, "all ranks again")
    write_program(tmp_path, "go", "")
    out, _ = finish(following)
    assert f"node 1 ({lost}) was lost" in out
