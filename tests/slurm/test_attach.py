"""Tests of commands for submitted jobs on the login host, over Slurm's own programs only."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from tests.conftest import clean_environment, ddplaunch_command, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT
from tests.tools.gridengine import GridEngine
from tests.tools.slurm.cluster import Slurm
from tests.tools.virtual_hosts.host import Host, finish

pytestmark = pytest.mark.ci

WAITS = """
    import os, sys, time
    rank = os.environ["RANK"]
    print(f"ready {rank}", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    print(f"went on {rank}", flush=True)
    sys.exit(3 if rank == "1" else 0)
    """


OWN = "/dev/shm/own"
"""A folder that each host has for itself."""


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


class Login:
    """The login host of a cluster, and what a user types there.

    Each host has its own folder of control sockets, as machines do, and ``home`` may be one that is its own too.
    """

    def __init__(self, cluster: Slurm | GridEngine, home: Path) -> None:
        self.cluster, self._home = cluster, home
        for host in cluster.network.hosts:
            host.run("mkdir", "-p", "-m", "700", OWN)

    @property
    def environment(self) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self._home), "XDG_RUNTIME_DIR": OWN}
        return {**clean_environment(), **self.cluster.environment, **state}

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        return self.cluster.login.type(ddplaunch_command(*words), self.cluster.folder, self.environment)

    def type(self, *words: str | Path) -> CommandResult:
        process = self.start(*words)
        out, err = process.communicate(timeout=scaled_timeout(100))
        return CommandResult(process.returncode, out, err)

    def submit(self, *words: str | Path) -> int:
        done = self.type("submit", *words)
        assert done.code == 0, done.err
        return int(re.findall(r"^job (\d+):", done.out)[0])


@pytest.fixture
def login(slurm: Callable[..., Slurm], tmp_path: Path) -> Callable[..., Login]:
    def make(nodes: int = 2, *, shared_home: bool = True, **options: Any) -> Login:
        write_program(tmp_path, "waits.py", WAITS)
        return Login(slurm(nodes, **options), tmp_path / "state" if shared_home else Path(OWN))

    return make


def test_a_job_is_seen_from_the_login_host(login, tmp_path):
    """Queued, running on two nodes, ended with an exit code; and followed by a shell that did not submit it."""
    at = login()
    cluster = at.cluster
    job = at.submit("--nodes", "2", "--exclusive", *LIGHT, "--nproc", "2", "waits.py")
    number = str(job)
    cluster.wait_for(job, "ready", 4)
    next_one = at.submit(
        "--nodes", "2", "--exclusive", "--job-name", "next", "--dependency", f"afterok:{job}", "waits.py"
    )

    shown = at.type("ps").out.splitlines()
    shown = shown[next(line for line, text in enumerate(shown) if text.startswith("JOB ")) :]
    assert shown[0].split() == ["JOB", "SUBMITTED", "NODES", "RANKS", "COLLECTIVES/S", "TARGET", "STATE"]
    assert re.fullmatch(rf"{next_one} +\S+ ago +2 +- +- +waits.py +waits: \w+", shown[1])
    assert re.fullmatch(rf"{job} +\S+ ago +2 +4 +- +waits.py +running", shown[2])
    listed = at.type("ps", "--json")
    assert listed.code == 0, listed.err
    found = {each["run"]: each for each in json.loads(listed.out)}
    assert (found[number]["state"], found[number]["world_size"], found[number]["code"]) == ("is running", 4, None)
    assert found[str(next_one)]["state"].startswith("waits: ")

    stacks = at.type("stacks", number)
    assert stacks.code == 0, stacks.err
    assert "waits.py" in stacks.out
    assert "ranks 0 to 3" in stacks.out, "those of both nodes"
    waiting = at.type("stacks", str(next_one))
    assert (waiting.code, waiting.out) == (2, "")
    assert f"job {next_one} waits: " in waiting.err
    assert ": no rank runs\n" in waiting.err

    assert at.type("logs", number, "--rank", "3") == CommandResult(0, "ready 3\n", "")
    assert at.type("logs", number).out == cluster.output(job)
    following = at.start("logs", number, "--rank", "2", "--follow")
    assert following.stdout is not None
    assert following.stdout.readline() == "ready 2\n"
    assert "began" in at.type("report", number).out

    attached = at.start("attach", number)
    assert attached.stdout is not None
    while "ready" not in (line := attached.stdout.readline()):
        assert line, attached.communicate(timeout=scaled_timeout(60))
    write_program(tmp_path, "go", "")
    out, err = finish(attached, 3)
    assert "ddplaunch: rank 1 exited with code 3" in out
    assert err.splitlines()[-1] == f"ddplaunch: job {job} failed (exit code 3)"
    following.communicate(timeout=scaled_timeout(60))  # it ends with the job

    again = at.type("attach", number)
    assert (again.code, again.err) == (3, f"ddplaunch: job {job} failed (exit code 3)\n")
    assert again.out == cluster.output(job)
    assert re.search(rf"^{job} .* failed \(exit code 3\)$", at.type("ps").out, re.MULTILINE)
    assert "rank 1 exited with code 3" in at.type("report", number).out

    assert at.type("stop", "next").err.splitlines() == [
        f"stopping job {next_one}",
        f"job {next_one} was cancelled (exit code 143)",
    ]
    assert at.type("attach", "next").code == 143
    assert f"job {next_one} was cancelled (exit code 143)" in at.type("stop", "next").err


def debugged(at: Login, host: Host, job: str, rank: int) -> str:
    """Type at a rank's debugger, on any host; the name of the one where the rank is."""
    lines = write_program(at.cluster.folder, "lines", "p 'rank', rank, os.uname().nodename\n")
    with lines.open() as typed:
        words = ddplaunch_command("debug", job, "--rank", str(rank))
        output = host.run(*words, cwd=at.cluster.folder, env=at.environment, stdin=typed)
    assert f"(rank {rank}) p 'rank', rank" in output
    return output.rpartition(f"('rank', '{rank}', '")[2].partition("'")[0]


def test_a_job_on_nodes_with_homes_of_their_own(login, tmp_path):
    """Its record and its debugger are on its nodes, and queried there; ``--now`` kills it without grace."""
    at = login(shared_home=False, settings={"KillWait": "300"})
    cluster = at.cluster
    write_program(tmp_path, "deaf.py", f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{dedent(WAITS)}")
    job = at.submit(*("--nodes", "2", "--exclusive", "--grace", "300", "--debug"), *LIGHT, "--nproc", "2", "deaf.py")
    number = str(job)
    cluster.wait_for(job, "ready", 4)
    found = at.type("report", number)
    assert found.code == 0, found.err
    assert f"{job}.0: running" in found.out
    assert "deaf.py" in at.type("stacks", number).out
    assert sorted(at.type("logs", number, "--rank", "0,3").out.splitlines()) == ["[0] ready 0", "[3] ready 3"]
    places = [debugged(at, cluster.login, str(job), rank) for rank in range(4)]
    assert places[0] == places[1] != places[2] == places[3], places
    node = next(host for host in cluster.network.hosts if host.name == places[3])
    assert debugged(at, node, f"{job}.0", 0) == places[0], "and back"
    refused = at.type("logs", number, "--rank", "4")
    assert refused.code == 2
    assert f"--rank 4: {job}.0 has ranks 0 to 3" in refused.err
    last = at.type("stop", number, "--now").err.splitlines()[-1]
    assert last in (f"job {job} was cancelled (exit code 143)", f"job {job} failed (exit code 137)")
    found = at.type("report", number)
    assert found.code == 1
    assert f"{last}; its record is not on this machine" in found.err
    assert at.type("logs", number).out == cluster.output(job)
    assert not [pid for host in cluster.network.hosts for pid in host.find("deaf.py")]

    alone = at.submit("--nodes", "1", "--cpus-per-task", "2", *LIGHT, "--nproc", "2", "waits.py")
    cluster.wait_for(alone, "ready", 2)
    assert "waits.py" in at.type("stacks", str(alone)).out, "the run has the job's number on one node too"
    assert f"{alone}.0: running" in at.type("report", str(alone)).out
    assert at.type("stop", str(alone), "--now").code == 0


def test_an_array_in_a_folder_with_a_percent_sign(login, tmp_path):
    """squeue is asked once for all; sbatch would read the folder's name as a pattern. Then the controller is killed."""
    at = login()
    cluster = at.cluster
    cluster.folder = tmp_path / "50%j"
    write_program(cluster.folder, "waits.py", WAITS)
    array = str(at.submit("--array", "0-1", "--cpus-per-task", "2", *LIGHT, "--nproc", "2", "waits.py"))
    log = cluster.folder / f"slurm-{array}_1.out"
    cluster.wait_until(lambda: log.exists() and log.read_text().count("ready") == 2, "the ranks")
    alone = at.submit("--job-name", "alone", "--dependency", f"afterany:{array}", "waits.py")
    states = re.findall(rf"(?m)^(?:{array}|{alone}) .*waits.py +(.*)$", at.type("ps").out)
    assert states == ["waits: Dependency", "2 running"]
    assert at.type("logs", f"{array}_1").out == log.read_text()
    assert "waits.py" in at.type("stacks", f"{array}_1").out
    write_program(cluster.folder, "go", "")
    ended = at.type("attach", f"{array}_1")
    assert ended.code == 3, ended.err
    assert ended.out == log.read_text()
    cluster.wait(alone)
    lines = at.type("report", array).out.splitlines()
    assert lines[0] == f"job {array}, array 0-1: 2 failed"
    assert lines[3] == f"1      failed (exit code 3)  {log}"
    never = at.type("attach", "4")
    assert (never.code, never.err.splitlines()[0]) == (
        2,
        "Error: Slurm does not know job 4, and it was not submitted here",
    )

    waits = at.submit("--sbatch-arg=--hold", "waits.py")
    cluster.login.run("sh", "-c", "kill -9 $(cat /dev/shm/slurm/slurmctld.pid)")
    stopped = at.type("stop", str(waits))
    assert stopped.code == 69
    assert "Slurm's controller is down: Slurmctld(primary) at n0 is DOWN\n" in stopped.err
    assert "Slurm's controller is down" in at.type("ps").out
    assert at.type("logs", f"{array}_1").out == log.read_text()


def test_a_job_of_a_script_of_ones_own_is_found(login):
    """It was not submitted by ddplaunch; its number is enough on the login host."""
    at = login()
    run = " ".join(map(str, ddplaunch_command("run", *LIGHT, "--nproc", "2", "waits.py")))
    script = at.cluster.folder / "own.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nsrun {run}\n")
    job = at.cluster.sbatch(script=script, **at.environment)
    at.cluster.wait_for(job, "ready", 4)

    def listed():
        shown = at.type("ps", "--json")
        assert shown.code == 0, shown.err
        (row,) = (each for each in json.loads(shown.out) if each["run"].partition(".")[0] == str(job))
        return row

    row = listed()
    assert (row["run"], row["state"], row["world_size"], row["code"]) == (str(job), "is running", 4, None)
    assert row["target"].endswith("waits.py")
    assert at.type("logs", str(job), "--rank", "3") == CommandResult(0, "ready 3\n", ""), "of the second node"
    assert "running: 4 ranks" in at.type("top", str(job)).out
    shown = at.type("stacks", str(job))
    assert shown.code == 0, shown.err
    assert "waits.py" in shown.out
    stopped = at.type("stop", str(job))
    assert stopped.code == 0, stopped.err
    assert stopped.err.startswith(f"stopping job {job}\n")
    row = listed()
    assert (row["run"], row["state"], row["code"]) == (f"{job}.0", "stopped", 143), "its run, once"
