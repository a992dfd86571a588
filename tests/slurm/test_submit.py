"""Tests of ``ddplaunch submit`` with a real sbatch: from the login host to the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAMS, clean_environment, ddplaunch_command, wait_until, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.slurm.test_run import SHOWS, lines
from tests.start_modes import LIGHT
from tests.tools.slurm.cluster import Slurm
from tests.tools.virtual_hosts.host import Host, finish

pytestmark = pytest.mark.ci


@pytest.fixture
def submit(
    slurm: Callable[..., Slurm], request: pytest.FixtureRequest
) -> Callable[..., tuple[Slurm, Callable[..., subprocess.Popen[str]]]]:
    """Make a cluster, as the fixture ``slurm`` does, and what starts ``ddplaunch submit`` on its login host.

    Without arguments it is the one that tests share.
    """

    def make(*nodes: int, **options: Any) -> tuple[Slurm, Callable[..., subprocess.Popen[str]]]:
        own = nodes or options
        cluster: Slurm = slurm(*nodes, **options) if own else request.getfixturevalue("standing_slurm")

        def start(*words: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
            environment = {**clean_environment(), **cluster.environment}
            return cluster.login.type(ddplaunch_command("submit", *words), cwd or cluster.folder, environment)

        return cluster, start

    return make


def number_of(following: subprocess.Popen[str]) -> int:
    """Read what it says up to the job's number."""
    assert following.stderr is not None
    result = ""
    while not (found := re.search(r"job (\d+):", result)):
        line = following.stderr.readline()
        assert line, result
        result += line
    return int(found[1])


def test_a_job_on_two_nodes_is_followed_to_its_end(submit, tmp_path):
    """The exit code is that of the failed rank."""
    cluster, start = submit()
    program = SHOWS.replace(
        "dist.destroy", "dist.barrier()  # the failure stops ranks that have not printed\ndist.destroy"
    )
    write_program(tmp_path, "train.py", program + "raise SystemExit(7 if os.environ['RANK'] == '1' else 0)\n")
    following = start("--nodes", "2", "--follow", "train.py", "--nproc", "2")
    out, err = finish(following, 7)
    assert lines(out) == ["sum 4 0 0 4 2 0 2", "sum 4 1 1 4 2 0 2", "sum 4 2 0 4 2 1 2", "sum 4 3 1 4 2 1 2"], err
    assert "slurm: this is node 0 of 2, at n1" in out
    assert "ddplaunch: rank 1 exited with code 7" in out
    assert not [pid for host in cluster.network.hosts for pid in host.find("train.py")]


def test_what_slurm_refuses_has_a_hint(submit, tmp_path):
    _, start = submit()
    write_program(tmp_path, "train.py", "")
    for words, refusal, hint in (
        ("--partition=nosuch", "Invalid partition name specified", "sinfo -s"),
        ("--constraint=nosuch", "Invalid feature specification", 'sinfo -o "%P %D %f"'),
        ("--mem=9T", "Requested node configuration is not available", 'sinfo -o "%P %D %c %m %G %f"'),
        ("--gpus-per-node=8", "Invalid generic resource (gres) specification", 'sinfo -o "%P %D %G"'),
    ):
        refused = start(*words.split(), "train.py")
        *slurms, error, lines = finish(refused, 2)[1].splitlines()
        assert refusal in slurms[-1]
        assert error.startswith("Error: sbatch rejected ")
        assert hint in lines


def test_a_grid_is_an_array_whose_runs_differ_in_their_arguments(submit, tmp_path, state):
    cluster, start = submit()
    write_program(tmp_path, "train.py", "import sys; print(sys.argv[1:]); sys.exit(sys.argv[2] == '0.2')")
    said, _ = finish(start("--grid", "--lr 0.1,0.2", "--grid", "--tag 'a b'", *LIGHT, "train.py"))
    number = re.search(r"job (\d+): train.py on 1 node, 2 runs\n", said)[1]
    environment = {**clean_environment(), **cluster.environment}

    def type_there(*words: str, code: int = 0) -> tuple[str, str]:
        return finish(cluster.login.type(ddplaunch_command(*words), cluster.folder, environment), code)

    assert f"job {number}: 1 completed, 1 failed\n" in type_there("wait", number, code=1)[1]
    first, heads, *rows, _ = type_there("report", number)[0].splitlines()
    assert first == f"job {number}, grid of 2: 1 completed, 1 failed"
    assert heads.split() == ["INDEX", "RUN", "STATE", "LOG"]
    assert [row.split()[:4] for row in rows] == [
        ["0", "lr=0.1,tag=a", "b", "completed"],
        ["1", "lr=0.2,tag=a", "b", "failed"],
    ]
    jobs = json.loads(type_there("report", number, "--json")[0])["jobs"]
    assert [(job["name"], job["code"]) for job in jobs] == [("lr=0.1,tag=a b", 0), ("lr=0.2,tag=a b", 1)]
    printed = [Path(job["log"]).read_text().splitlines()[-1] for job in jobs]
    assert printed[0].endswith("['--lr', '0.1', '--tag', 'a b']")


def test_a_job_is_submitted_again_and_compared(submit, tmp_path, state):
    cluster, start = submit()
    write_program(tmp_path, "train.py", "import sys; print(sys.argv[1:], 'loss', len(sys.argv))")
    environment = {**clean_environment(), **cluster.environment}

    def type_there(*words: str) -> tuple[str, str]:
        return finish(cluster.login.type(ddplaunch_command(*words), tmp_path, environment))

    following = start("--follow", *LIGHT, "train.py", "--lr", "0.1", cwd=tmp_path)
    first = number_of(following)
    finish(following)
    out, err = type_there("rerun", str(first), "--lr", "0.2", "--amp")
    assert f"ddplaunch: ddplaunch submit --follow {' '.join(LIGHT)} train.py -- --lr 0.2 --amp\n" in err
    assert f"ddplaunch: in {tmp_path}\n" in err
    assert "commit, changes, versions and machine are as for" in err or "host: " in err
    assert "['--lr', '0.2', '--amp'] loss 4" in out
    table, _ = type_there("report", str(first), str(first + 1))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line}
    assert (rows["--lr"], rows["--amp"]) == (["0.1", "0.2"], ["-", "set"])
    assert rows["state"] == ["done", "done"]


SAVES = """
    import os, signal, sys, time
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    print("ready", flush=True)
    while not received or "deaf" in sys.argv:
        time.sleep(0.1)
    time.sleep(1)
    print("saved", flush=True)
    """


def test_a_cancelled_job_has_its_grace(submit, tmp_path):
    """Slurm signals every process of the step here, the zygotes too: the ranks live until they have saved.

    Then the teardown runs, and the next job, which waits for its end, has a file of its own for stderr.
    """
    cluster, start = submit(settings={"KillWait": "40"})
    write_program(tmp_path, "saves.py", SAVES)
    torn = ("--teardown", "echo torn $SLURM_JOB_ID; exit 4")
    following = start("--exclusive", "--nodes", "2", *torn, "--follow", *LIGHT, "--nproc", "2", "saves.py")
    job = number_of(following)
    write_program(tmp_path, "fails.py", "import sys; print('bad', file=sys.stderr); sys.exit(9)")
    waits = ("--dependency", f"afternotok:{job}", "--error", "errs/%j.err", *torn)
    waiting = start(*waits, "--follow", *LIGHT, "fails.py")
    after = number_of(waiting)
    cluster.wait_for(job, "ready", 4)
    assert cluster.state(after) == "PENDING"
    cluster.cancel(job)
    out, err = finish(following, 143)
    assert f"job {job} was cancelled (exit code 143)" in err
    assert out.count("saved") == 4
    assert out.rindex("saved") < out.index(f"torn {job}")
    assert cluster.wait(job) == "CANCELLED"
    assert not [pid for host in cluster.network.hosts for pid in host.find("saves.py")]
    out, err = finish(waiting, 9)
    assert out == f"torn {after}\n"
    assert "bad\n" in err
    assert "bad\n" in (tmp_path / f"errs/{after}.err").read_text()


def test_preempted_jobs(submit, tmp_path):
    """They end by themselves within the grace, to Slurm scripts that failed, or Slurm ends them."""
    cluster, start = submit(4, settings={"MessageTimeout": "5"})  # looks every 7 s whether the grace is over
    write_program(tmp_path, "saves.py", SAVES)
    options = ("--nodes", "2", "--exclusive", "--sbatch-arg=--no-requeue", "--grace", "60", "--follow")
    ours = {how: start(*options, "saves.py", "--", how) for how in ("saves", "deaf")}
    jobs = {how: number_of(following) for how, following in ours.items()}
    for job in jobs.values():
        cluster.wait_for(job, "ready", 2)
    high = cluster.sbatch("-p", "high", "-N4", "--exclusive", script="hostname")
    for how, following in ours.items():
        out, err = finish(following, 75)
        assert "was preempted (exit code 75)" in err
        assert out.count("saved") == (0 if how == "deaf" else 2)
    assert cluster.wait(high) == "COMPLETED"
    assert {how: cluster.state(job) for how, job in jobs.items()} == {"saves": "FAILED", "deaf": "PREEMPTED"}
    assert not [pid for host in cluster.network.hosts for pid in host.find("saves.py")]


def test_requeued_jobs(submit, tmp_path):
    """The log is shown once, and whole; ``--requeue`` ends in time."""
    cluster, start = submit()
    program = "import os, time; again = os.environ.get('SLURM_RESTART_COUNT')\n"
    write_program(tmp_path, "twice.py", program + "print('ready', again, flush=True)\nif not again: time.sleep(1000)\n")
    program += "from ddplaunch import runtime\nprint('run', again, flush=True)\n"
    write_program(tmp_path, "asks.py", program + "while not runtime.preempted(): time.sleep(0.01)\n")
    twice = start("--nodes", "2", "--follow", "twice.py")
    asks = start("--nodes", "2", "--requeue", "1", "--follow", *LIGHT, "--nproc", "2", "asks.py")
    followed, limited = number_of(twice), number_of(asks)
    cluster.wait_for(followed, "ready None", 2)
    cluster.requeue(followed)
    for again in (None, 1):
        cluster.wait_for(limited, f"run {again}", 4)
        cluster.cancel(limited, "--signal=USR2")

    out, err = finish(twice)
    assert f"job {followed} was requeued and waits" in err
    assert "completed (exit code 0)" in err
    assert out == cluster.output(followed)
    assert [out.count(f"ready {count}") for count in (None, 1)] == [2, 2]

    out, err = finish(asks, 75)
    assert "ddplaunch: requeueing, 1 of 1" in out
    assert "not requeued again: --requeue 1" in out
    assert not list(tmp_path.glob(".ddplaunch-exit-*"))
    environment = {**clean_environment(), **cluster.environment}
    report = cluster.login.type(ddplaunch_command("report", str(limited), "--json"), cluster.folder, environment)
    out, err = report.communicate(timeout=scaled_timeout(100))
    result = json.loads(out)
    assert result["runs"] == [f"{limited}.0.1", f"{limited}.0.2"], err
    assert (result["job"], result["state"]) == (str(limited), "preempted")
    assert result["time_by_phase"]["queued"] > 0.1, "before the first run and between both"


def test_a_node_loses_power_and_comes_back(submit):
    """Our job notices first. Then Slurm does, after some 14 s (by default 300), and requeues jobs or has them fail.

    And srun, where the node had the only task, ends with 0 as if all were well.
    """
    cluster, start = submit(settings={"SlurmdTimeout": "6", "MessageTimeout": "4"})
    node = cluster.nodes[1]
    options = ("--nodes", "2", "--sbatch-arg=--no-requeue", "--heartbeat-timeout", "4", "--follow")
    following = start(*options, PROGRAMS / "sleeper.py")
    again = cluster.sbatch("-N2", script="hostname; sleep 1000")
    once = cluster.sbatch("-w", "n2", "--no-requeue", script="hostname; sleep 1000")
    step = cluster.srun("-w", "n2", "sleep", "1000")
    for job in (again, once):
        cluster.wait(job, "RUNNING")
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    wait_until(lambda: len(node.find("sleep 1000$")) == 2, "the tasks")
    node.power_off()
    assert cluster.wait(once) == "NODE_FAIL"
    cluster.wait(again, "PENDING")
    assert "n2 down*" in cluster.run("sinfo", "-h", "-N", "-o", "%N %T")
    out, err = step.communicate(timeout=scaled_timeout(60))
    assert (step.returncode, out) == (0, "")
    assert "Node failure on n2" in err
    node.boot()
    cluster.join(node)
    out, err = finish(following, 69)
    assert "node 1 (n2) was lost" in out
    assert f"job {job} lost a node (exit code 69)" in err
    assert cluster.state(job) == "NODE_FAIL"
    assert cluster.wait(again, "RUNNING") == "RUNNING"
    assert cluster.restarts(again) == 1


ONE_MORE = """
import os, time
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
place = (os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.uname().nodename)
print("again" if again else "ready", *place, flush=True)
while not (again and os.path.exists("go")):
    time.sleep(0.05)
"""


def test_a_job_that_went_on_with_a_spare_has_not_failed(submit, tmp_path):
    """Of its three nodes it loses one to kill -9, or the site takes it away: Slurm's own word is 137 for both.

    Without node 0 it fails, and the spare does not wait for that.
    """
    cluster, start = submit(3)
    write_program(tmp_path, "train.py", ONE_MORE)
    options = ("--nodes", "2", "--spares", "1", "--follow", "--nproc", "1", *LIGHT)

    def kill(node: Host) -> None:
        (launcher,) = node.find(r"^\S+python\S* .*main\(\) run --cluster slurm")
        os.kill(launcher, signal.SIGKILL)

    for lose in (
        lambda: kill(cluster.nodes[1]),
        lambda: cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test"),
    ):
        (tmp_path / "go").unlink(missing_ok=True)
        following = start(*options, "train.py")
        job = number_of(following)
        after = cluster.sbatch(f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", script="true")
        cluster.wait_for(job, "ready 1 of 2 n2")
        lose()
        cluster.wait_for(job, "again", 2)
        write_program(tmp_path, "go", "")
        out, err = following.communicate(timeout=scaled_timeout(60))
        assert (following.returncode, cluster.wait(job), cluster.wait(after)) == (0, "COMPLETED", "COMPLETED"), (
            out + err
        )
        assert "srun: error: n2: task 1: Killed" in out
        assert not list(tmp_path.glob(".ddplaunch-exit-*"))
    cluster.run("scontrol", "update", "nodename=n2", "state=idle")
    following = start(*options, "train.py")
    cluster.wait_for(number_of(following), "ready", 2)
    kill(cluster.nodes[0])
    out, err = finish(following, 137)
    assert "Slurm reports that node 0 (n1) has ended" in out
    words = ddplaunch_command("report", cluster.run("squeue", "-h", "-t", "all", "-o", "%i", "-S", "-i").split()[0])
    report = cluster.login.type(words, cluster.folder, {**clean_environment(), **cluster.environment})
    out, err = report.communicate(timeout=scaled_timeout(60))
    assert "failed (exit code 137)" in err
    assert ".0: lost: " in out
    assert ": running\n" not in out


def test_a_node_that_comes_back_after_the_end_of_the_job_does_not_keep_it(submit, tmp_path):
    """Slurm has not noticed that it was lost, and srun waits for its task."""
    cluster, start = submit(3, settings={"SlurmdTimeout": "300"})
    write_program(tmp_path, "train.py", ONE_MORE)
    out, err = start(
        *("--nodes", "2", "--spares", "1", "--heartbeat-timeout", "4", "--nproc", "1", *LIGHT),
        *("--dry-run", "train.py"),
    ).communicate(timeout=scaled_timeout(60))
    assert "\n  sleep 60 3>&-\n" in out, err
    sooner = out.replace("sleep 60 3>&-", "sleep 2 3>&-").replace("do sleep 5 3>&-", "do sleep 0.1 3>&-")
    script = write_program(tmp_path, "job.sh", sooner)  # before srun gives up by itself, 4 s after the node is back
    job = cluster.sbatch(script=script, **clean_environment())
    cluster.wait_for(job, "ready", 2)
    node = cluster.nodes[1]
    node.power_off()
    cluster.wait_for(job, "again", 2)
    write_program(tmp_path, "go", "")
    left = tmp_path / f".ddplaunch-exit-{job}"
    cluster.wait_until(lambda: left.exists() and left.read_text() == "0\n", "the exit code")
    node.boot()
    cluster.join(node)
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert not left.exists()
    assert "srun still waits" in cluster.output(job)


FAILS_ON_N1 = """
import os, socket, time
again = os.environ.get("SLURM_RESTART_COUNT")
print("run", again, "on", socket.gethostname(), flush=True)
if socket.gethostname() == "n1":
    raise SystemExit(9)
time.sleep(0 if again else 600)
"""


def test_a_node_whose_rank_failed_is_left_out_of_the_requeue(submit, tmp_path):
    """Also beside a node that the job excludes already; a failure with another exit code ends the job."""
    cluster, start = submit(4)
    write_program(tmp_path, "fails.py", FAILS_ON_N1)
    options = ("--exclusive", "--requeue", "3", "--requeue-on", "4,9", "--follow", *LIGHT)
    following = start("--nodes", "2", "--exclude", "n4", *options, "fails.py")
    job = number_of(following)
    out, err = finish(following)
    # Slurm may write a line of its own between them.
    assert re.search(
        "^ddplaunch: requeueing, 1 of 3\n(.*\n)*?ddplaunch: without n1, which has failed$", out, re.MULTILINE
    ), out
    assert sorted(re.findall("run 1 on (n.)", out)) == ["n2", "n3"], err
    assert cluster.restarts(job) == 1
    excluded = cluster.run("scontrol", "show", "hostnames", cluster.show(job)["ExcNodeList"])
    assert sorted(excluded.split()) == ["n1", "n4"]
    write_program(tmp_path, "ends.py", "raise SystemExit(5)")
    out, _ = finish(start(*options, "ends.py"), 5)
    assert "requeue" not in out
