"""``ddplaunch submit`` with a real sbatch: from the login host to the ranks and back to an exit code."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, clean_environment, command, write
from tests.slurm.test_run import SHOWS, lines


@pytest.fixture
def submit(slurm, request):
    """A cluster of two nodes, and what starts ``ddplaunch submit`` on its login host; settings may be its parameter."""
    settings = getattr(request, "param", {})
    cluster = slurm(2, accounting="AccountingStorageEnforce" in settings, settings=settings)

    def start(*words: str | Path) -> subprocess.Popen[str]:
        return cluster.login.start(
            command("submit", *words),
            cwd=cluster.folder,
            env={**clean_environment(), **cluster.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return cluster, start


def number_of(following: subprocess.Popen[str]) -> int:
    """Read what it says up to the job's number."""
    assert following.stderr is not None
    said = ""
    while not (found := re.search(r"job (\d+):", said)):
        line = following.stderr.readline()
        assert line, said
        said += line
    return int(found[1])


@pytest.mark.slow
def test_a_job_on_two_nodes_is_followed_to_its_end(submit, tmp_path):
    cluster, start = submit
    write(tmp_path, "train.py", SHOWS)
    out, err = start("--nodes", "2", "--follow", "train.py", "--nproc", "2").communicate(timeout=100)
    assert lines(out) == ["sum 4 0 0 4 2 0 2", "sum 4 1 1 4 2 0 2", "sum 4 2 0 4 2 1 2", "sum 4 3 1 4 2 1 2"], err
    assert "slurm: this is node 0 of 2, at n1" in out
    assert not [pid for host in cluster.network.hosts for pid in host.find("train.py")]


@pytest.mark.slow
def test_the_exit_code_of_a_rank_comes_back(submit):
    _, start = submit
    following = start("--nodes", "2", "--follow", PROGRAMS / "fails.py", "--", "exit", "1")
    out, err = following.communicate(timeout=100)
    assert following.returncode == 7, err
    assert "ddplaunch: rank 1 exited with code 7" in out


@pytest.mark.slow
def test_a_cancelled_job_is_stopped_on_all_nodes(submit):
    """SIGTERM reaches every launcher at once, and the ranks have their grace."""
    cluster, start = submit
    following = start("--nodes", "2", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    cluster.cancel(job)
    following.communicate(timeout=60)
    assert following.returncode == 143
    assert cluster.wait(job) == "CANCELLED"
    assert not [pid for host in cluster.network.hosts for pid in host.find("sleeper.py")]


@pytest.mark.slow
def test_what_slurm_refuses_is_said(submit, tmp_path):
    _, start = submit
    write(tmp_path, "train.py", "")
    refused = start("--partition", "nosuch", "train.py")
    out, err = refused.communicate(timeout=60)
    assert (refused.returncode, out) == (2, "")
    assert "invalid partition specified: nosuch" in err
    assert "sbatch did not take the job" in err


@pytest.mark.slow
@pytest.mark.parametrize("submit", [{"AccountingStorageEnforce": "associations,qos"}], indirect=True)
def test_a_site_that_keeps_accounts(submit, tmp_path):
    """What it refuses, with what to type instead; and a job on the right account."""
    cluster, start = submit
    write(tmp_path, "train.py", "raise SystemExit(3)")
    for words, refusal, hint in (
        ("--account=nosuch", "Invalid account or account/partition combination", "sacctmgr show associations"),
        ("--account=test --qos=nosuch", "Invalid qos specification", "sacctmgr show qos"),
        ("--partition=nosuch", "Invalid partition name specified", "sinfo -s"),
        ("--constraint=nosuch", "Invalid feature specification", 'sinfo -o "%P %D %f"'),
        ("--mem=9T", "Requested node configuration is not available", 'sinfo -o "%P %D %c %m %G %f"'),
        ("--gpus-per-node=8", "Invalid generic resource (gres) specification", 'sinfo -o "%P %D %G"'),
    ):
        refused = start(*words.split(), "train.py")
        *slurms, error, said = refused.communicate(timeout=60)[1].splitlines()
        assert refused.returncode == 2
        assert refusal in slurms[-1]
        assert error == "Error: sbatch did not take the job (exit code 1)"
        assert hint in said
    following = start("--account=test", "--qos=normal", "--follow", "train.py")
    job = number_of(following)
    assert following.wait(60) == 3
    words = ["sacct", "-X", "-n", "-P", "-o", "Account,QOS,State,ExitCode", "-j", str(job)]
    cluster.wait_until(lambda: cluster.run(*words) == "test|normal|FAILED|3:0\n", "sacct")


@pytest.mark.slow
def test_detaching_leaves_the_job_running(submit):
    cluster, start = submit
    following = start("--nodes", "1", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready")
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=30)
    assert following.returncode == 130
    assert cluster.state(job) == "RUNNING"
    cluster.cancel(job)


SAVES = """
    import os, signal, sys, time
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    print("ready", flush=True)
    while not told or "deaf" in sys.argv:
        time.sleep(0.1)
    time.sleep(1)
    print("saved", flush=True)
    """


@pytest.mark.slow
@pytest.mark.parametrize("submit", [{"KillWait": "40"}], indirect=True)
def test_a_cancelled_job_has_its_grace(submit, tmp_path):
    """Slurm tells every process of the step here, the zygotes too: the ranks live until they have saved."""
    cluster, start = submit
    write(tmp_path, "saves.py", SAVES)
    following = start("--nodes", "2", "--cpus-per-task", "2", "--follow", "saves.py", "--nproc", "2")
    job = number_of(following)
    cluster.wait_for(job, "ready", 4)
    cluster.cancel(job)
    out, err = following.communicate(timeout=60)
    assert following.returncode == 143, err
    assert out.count("saved") == 4
    assert f"job {job} was cancelled (exit code 143)" in err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["saves", "deaf"])
def test_a_preempted_job(submit, tmp_path, how):
    """It ends by itself within the grace, to Slurm a script that failed, or Slurm ends it."""
    cluster, start = submit
    write(tmp_path, "saves.py", SAVES)
    options = ("--nodes", "2", "--sbatch-arg=--exclusive", "--sbatch-arg=--no-requeue", "--grace", "60", "--follow")
    following = start(*options, "saves.py", "--", how)
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    high = cluster.sbatch("-p", "high", "-N2", "--exclusive", script="true")
    out, err = following.communicate(timeout=100)
    assert following.returncode == 75, err
    assert "had to make room for another (exit code 75)" in err
    assert out.count("saved") == (0 if how == "deaf" else 2)
    assert cluster.wait(high) == "COMPLETED"
    assert cluster.state(job) == ("PREEMPTED" if how == "deaf" else "FAILED")
    assert not [pid for host in cluster.network.hosts for pid in host.find("saves.py")]


@pytest.mark.slow
def test_a_requeued_job_is_followed_on(submit, tmp_path):
    """The log is shown once, and whole."""
    cluster, start = submit
    program = "import os, time; again = os.environ.get('SLURM_RESTART_COUNT')\n"
    write(tmp_path, "twice.py", program + "print('ready', again, flush=True)\nif not again: time.sleep(1000)\n")
    following = start("--nodes", "2", "--follow", "twice.py")
    job = number_of(following)
    cluster.wait_for(job, "ready None", 2)
    cluster.requeue(job)
    out, err = following.communicate(timeout=100)
    assert following.returncode == 0, err
    assert f"job {job} was requeued, and waits" in err
    assert "is done (exit code 0)" in err
    assert out == cluster.output(job)
    assert [out.count(f"ready {count}") for count in (None, 1)] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("submit", [{"SlurmdTimeout": "20"}], indirect=True)  # we are to notice first
def test_a_lost_node_ends_the_job(submit):
    cluster, start = submit
    following = start("--nodes", "2", "--sbatch-arg=--no-requeue", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    cluster.nodes[1].power_off()
    out, err = following.communicate(timeout=120)
    assert following.returncode == 69, err
    assert "node 1 (n2) was lost" in out
    assert f"job {job} lost a node (exit code 69)" in err
    assert cluster.state(job) == "NODE_FAIL"


@pytest.mark.slow
def test_a_job_that_is_cancelled_while_it_waits(submit):
    cluster, start = submit
    cluster.wait(cluster.sbatch("-N2", "--exclusive", script="sleep 1000"), "RUNNING")
    following = start("--nodes", "2", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.cancel(job)
    out, err = following.communicate(timeout=60)
    assert (following.returncode, out) == (143, ""), err
    assert f"job {job} was cancelled (exit code 143)" in err


@pytest.mark.slow
def test_each_index_of_an_array_is_a_job(submit, tmp_path):
    """On two nodes each, both at once, with a log each; one is cancelled alone."""
    cluster, start = submit
    stays = "import sys, time; sys.stdout.flush(); time.sleep(1000 * int(os.environ['SLURM_ARRAY_TASK_ID']))\n"
    write(tmp_path, "train.py", SHOWS + stays)
    submitted = start("--nodes", "2", "--array", "0-1", "--cpus-per-task", "2", "train.py")
    out, err = submitted.communicate(timeout=60)
    assert submitted.returncode == 0, err
    job = int(out.split()[1].rstrip(":"))
    logs = [tmp_path / f"slurm-{job}_{index}.out" for index in (0, 1)]

    def summed() -> bool:
        return all(log.exists() and log.read_text().count("] sum") == 2 for log in logs)

    cluster.wait_until(summed, "both", timeout=100)
    cluster.cancel(f"{job}_1")
    assert [cluster.wait(f"{job}_{index}") for index in (0, 1)] == ["COMPLETED", "CANCELLED"]
    assert [lines(log.read_text()) for log in logs] == [["sum 2 0 0 2 1 0 2", "sum 2 1 0 2 1 1 2"]] * 2
