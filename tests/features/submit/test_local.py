"""Tests of ``submit --scheduler local``: real jobs on this machine, with simulated GPUs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.base.errors import LaunchError, host_name
from ddplaunch.base.types import as_dict
from ddplaunch.features.submit import local
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.local_job import MIN_UNUSED_S, JobFolder, LocalJob, boot_id, make_job_folder
from ddplaunch.features.submit.local_supervisor import process_identity
from ddplaunch.system.schedulers.scheduler import Deadline, JobForgotten, JobId
from tests.conftest import assert_refused, ddplaunch_command, is_alive, run_command, wait_until, write_program
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

HOLDS = """
    import os, pathlib, sys, time
    print("has", os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[2:], flush=True)
    while pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.02)
    sys.exit(int(os.environ.get("CODE", "0")))
    """


class Machine:
    """A machine with simulated GPUs, and a user who types there."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env

    def type(self, *words, code: int | None = 0, **variables: str):
        done = run_command(ddplaunch_command(*words), self.folder, {**self.env, **variables})
        assert code in (None, done.returncode), done
        return done

    def submit(self, *words, **variables: str) -> str:
        """Submit a job with one rank that runs until its file is removed; return its number."""
        options = ("--scheduler", "local", *EXEC, "--nproc", "1")
        said = self.type("submit", *options, *words, **variables).stdout
        return re.match(r"job (\S+): ", said)[1]

    def file(self, name: str) -> Path:
        (path := self.folder / name).touch()
        return path

    def state(self, number: str) -> str:
        jobs = json.loads(self.type("ps", "--json").stdout)
        return next(job["state"] for job in jobs if job["run"] == number and job["ranks"] == [])

    def wait_for(self, number: str, state: str) -> None:
        wait_until(lambda: state in self.state(number), f"{state!r}: {self.state(number)}")

    def process(self, number: str, name: str) -> int:
        path = Path(self.env["XDG_STATE_HOME"], "ddplaunch", "local", number.removeprefix("local-"), name)
        wait_until(path.exists, str(path))
        return json.loads(path.read_text())["pid"]


@pytest.fixture
def machine(fake_nvml, state, tmp_path):
    (locks := tmp_path / "locks").mkdir()
    locks.chmod(0o1777)
    write_program(tmp_path, "holds.py", HOLDS)
    found = Machine(tmp_path, {**fake_nvml.environ(4), "DDPLAUNCH_LOCK_DIR": str(locks), "XDG_STATE_HOME": str(state)})
    yield found
    for path in state.glob("ddplaunch/local/*/job.json"):
        found.type("stop", f"local-{path.parent.name}", code=None)
        pids = [json.loads(each.read_text())["pid"] for each in path.parent.glob("*process*")]
        wait_until(lambda pids=pids: not any(map(is_alive, pids)), f"the end of {pids}")


@pytest.mark.ci
def test_jobs_wait_their_turn_and_ps_shows_what_for(machine):
    files = [machine.file(name) for name in "abc"]
    first, second, third = (
        machine.submit("--gpus-per-node", count, "holds.py", file)
        for count, file in zip("312", files, strict=True)
        if machine  # one after the other
    )
    machine.wait_for(first, "is running")
    machine.wait_for(second, "is running")
    machine.wait_for(third, "waits for 2 free GPUs, next in line")
    fourth = machine.submit("--gpus-per-node", "1", "holds.py", files[2])
    machine.wait_for(fourth, "waits for 1 free GPU, 1 run before it")
    assert (
        "reserved GPUs 0-2"
        in machine.type("logs", first).stdout + (machine.folder / f"ddplaunch-{first}.out").read_text()
    )
    files[1].unlink()
    assert machine.type("wait", second).returncode == 0
    machine.wait_for(third, "waits for 2 free GPUs, next in line")
    assert_refused(machine.type("logs", "--rank", "0", fourth, code=2), f"job {fourth} waits for 1 free GPU", "attach")
    files[0].unlink()
    machine.wait_for(third, "is running")
    machine.wait_for(fourth, "is running")
    files[2].unlink()
    attached = machine.type("attach", fourth)
    assert "has " in attached.stdout
    assert f"ddplaunch: job {fourth} completed (exit code 0)\n" in attached.stderr
    report = machine.type("report", first).stdout
    assert "queued" in report
    assert "succeeded" in report
    assert machine.state(third) == "completed (exit code 0)"


@pytest.mark.ci
def test_a_job_survives_its_terminal_and_is_stopped(machine, tmp_path):
    """The shell that submits it ends with SIGHUP to its session; the teardown runs in the end."""
    file = machine.file("a")
    number = machine.submit("--setup", "export CODE=7", "--teardown", "echo bye", "holds.py", file)
    machine.wait_for(number, "is running")
    supervisor = machine.process(number, "process.json")
    assert os.getsid(supervisor) == supervisor != os.getsid(0)
    file.unlink()
    assert machine.type("wait", number, code=7).returncode == 7
    assert (tmp_path / f"ddplaunch-{number}.out").read_text().endswith("bye\n")
    again = machine.submit("holds.py", machine.file("b"))
    machine.wait_for(again, "is running")
    assert "has ended" in machine.type("stop", again).stderr
    machine.wait_for(again, "was cancelled")
    assert machine.type("report", again).stdout.count("stopped")


@pytest.mark.ci
def test_a_waiting_job_is_cancelled(machine):
    file = machine.file("a")
    first = machine.submit("--jobs", "1", "holds.py", file)
    machine.wait_for(first, "is running")
    second = machine.submit("--jobs", "1", "holds.py", file)
    machine.wait_for(second, "waits for a place (--jobs 1), next in line")
    assert f"job {second} was cancelled (exit code 143)" in machine.type("stop", second).stderr
    assert machine.type("wait", second, code=143)
    assert_refused(machine.type("stop", second, code=2), f"job {second} was cancelled")


@pytest.mark.ci
def test_a_grid_on_this_machine(machine, tmp_path):
    file = machine.file("a")
    number = machine.submit("--gpus-per-node", "2", "--grid", "--lr 0.1,0.2,0.3", "holds.py", file)
    machine.wait_for(number, "1 pending, 2 running")
    rows = machine.type("report", number).stdout.splitlines()
    assert rows[0] == f"job {number}, grid of 3: 1 pending, 2 running"
    assert re.fullmatch(r"2 +lr=0.3 +waits for 2 free GPUs, next in line +\S+", rows[4])
    machine.type("stop", "lr=0.3")
    file.unlink()
    assert f"job {number}: 2 completed, 1 failed" in machine.type("wait", number, code=143).stderr
    assert [
        re.search(r"has (\S+) --lr (\S+)", (tmp_path / f"ddplaunch-{number}_{index}.out").read_text()).groups()
        for index in range(2)
    ] == [("0,1", "0.1"), ("2,3", "0.2")]
    assert "has 0,1 --lr 0.1" in machine.type("logs", "lr=0.1").stdout


@pytest.mark.ci
def test_what_a_kill_or_a_restart_has_lost(machine, state):
    """The supervisor is killed, or the machine was started since: what did not start is lost, and ps says so."""
    file = machine.file("a")
    number = machine.submit("--gpus-per-node", "4", "--grid", "--lr 1,2", "holds.py", file)
    machine.wait_for(number, "1 pending, 1 running")
    os.kill(machine.process(number, "process.json"), signal.SIGKILL)
    os.kill(machine.process(number, "1.process"), signal.SIGKILL)
    rows = machine.type("report", number).stdout.splitlines()
    assert re.match(r"0 +lr=1 +running", rows[2])
    machine.type("stop", number)
    waiting = machine.submit("--gpus-per-node", "4", "holds.py", file)
    job = state / "ddplaunch" / "local" / waiting.removeprefix("local-") / "job.json"
    job.write_text(re.sub(r'"boot": "[^"]*"', '"boot": "before"', job.read_text()))
    assert machine.state(waiting) == "was lost when this machine restarted (exit code 1)"
    os.kill(machine.process(waiting, "process.json"), signal.SIGTERM)


def make_job(*indices: str, host: str, pid: int | None = None) -> JobFolder:
    """Make the folder of a job, whose supervisor is the process ``pid``."""
    number, folder = make_job_folder(())
    job = LocalJob(number, indices, len(indices) > 1, None, "/dev/null", host, boot_id())
    Path(folder.path, "job.json").write_text(json.dumps(as_dict(job)))
    if pid is not None:
        Path(folder.path, "process.json").write_text(json.dumps(process_identity(pid)))
    return folder


def test_only_folders_of_jobs_that_have_ended_are_removed(state):
    """Not one that another submit has just made, nor one of another host that shares this home."""
    kept = [
        make_job("0", host=host_name(), pid=os.getpid()),
        make_job("0", host="elsewhere"),
        make_job("0", host=host_name()),
    ]
    removed = [make_job("0", host=host_name()), make_job_folder(())[1]]
    new = make_job_folder(())[1]
    last = make_job_folder(())[1]
    long_ago = time.time() - MIN_UNUSED_S - 5
    for folder in (*kept[:2], *removed):
        os.utime(folder.path, (long_ago, long_ago))
    made = make_job_folder(())[1]
    names = {path.name for path in (state / "ddplaunch" / "local").iterdir()}
    assert names == {os.path.basename(each.path) for each in (*kept, new, last, made)}


def test_an_index_that_an_array_does_not_have(state):
    """The job is alive: its supervisor is this process."""
    folder = make_job("0", "1", host=host_name(), pid=os.getpid())
    which = JobId("local-1", index="99")
    assert [*local.Local().query_records([which], Deadline(5))] == []
    with pytest.raises(JobForgotten, match="no longer knows job local-1_99"):
        local.Local().cancel(which)
    assert {*os.listdir(folder.path)} == {"job.json", "process.json"}
    states = local.Local().query_records([JobId("local-1", index="")], Deadline(5))
    assert [state.number for state in states] == ["local-1_0", "local-1_1"]


STOPPED_EARLY = "trap '[[ $BASH_COMMAND != launcher=\\$! ]] || kill -TERM $$' DEBUG"
"""For a bash script: SIGTERM arrives when the launcher has started, and its PID is not yet in the variable."""


def test_a_script_that_is_stopped_while_its_launcher_starts(tmp_path):
    """The launcher is a program that only the signal ends."""
    (launcher := tmp_path / "launcher").write_text("#!/bin/sh\nexec sleep 1000\n")
    launcher.chmod(0o700)
    job = BatchJob(["train.py"], str(launcher), str(tmp_path), "x")
    (script := tmp_path / "script").write_text(local.Local().render_script(job))
    (early := tmp_path / "early").write_text(STOPPED_EARLY)
    words = ["bash", str(script), "0", str(tmp_path / "end")]
    with subprocess.Popen(words, env={**os.environ, "BASH_ENV": str(early)}, start_new_session=True) as process:
        try:
            assert process.wait(scaled_timeout(20)) == 128 + signal.SIGTERM
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "end").read_text() == f"{128 + signal.SIGTERM}\n"


def test_a_process_that_starts_too_late_is_killed(state, tmp_path, monkeypatch):
    """It is a program that never says that it has started."""
    (python := tmp_path / "python").write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o700)
    started: list[subprocess.Popen[bytes]] = []

    def start(*args, **options):
        started.append(process := popen(*args, **options))
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(local, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", start)
    job = BatchJob(["train.py"], "python", str(tmp_path), "x")
    try:
        with pytest.raises(LaunchError, match="the process of local-1 did not start"):
            local.Local().submit_script(job, "")
        assert [process.poll() for process in started] == [-signal.SIGKILL]
    finally:
        started[0].kill()
        started[0].wait()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--nodes 2", ("--nodes 2 does not work with --scheduler local",)),
        ("--gpus-per-node a100:8", ("--gpus-per-node a100:8: --scheduler local takes a number only",)),
        ("--gpus-per-node 9", ("--gpus free:9: this machine has 4 whole GPUs",)),
        ("--partition x", ("--partition does not work with --scheduler local", "leave it out")),
        ("--gpus-per-node 2 --gpus 0,1", ("--gpus-per-node 2 and --gpus 0,1 contradict each other",)),
        ("--gpus FREE:9", ("--gpus free:9: this machine has 4 whole GPUs",)),
        ("--scheduler slurm --jobs 2", ("--jobs needs --scheduler local",)),
    ],
)
def test_what_this_machine_does_not_do(machine, words, parts):
    assert_refused(machine.type("submit", "--scheduler", "local", *words.split(), "holds.py", code=2), *parts)
