"""Tests of ``submit --via`` from a laptop, over a real sshd, to the login node of a real Slurm."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import clean_environment, ddplaunch_command, wait_until, write_program
from tests.features.code.project import git, make_project
from tests.features.ssh.sshd import Sshd
from tests.features.ssh.sshd import unsupported as no_sshd
from tests.scaled_timeouts import scaled_timeout
from tests.slurm.test_attach import OWN, CommandResult
from tests.start_modes import LIGHT
from tests.tools.slurm.cluster import Slurm, unsupported
from tests.tools.virtual_hosts.network import Network

pytestmark = pytest.mark.ci

PROGRAM = """
import os, sys, time
from pkg.model import NAME
print("runs", NAME, os.environ["RANK"], os.path.basename(os.getcwd()), flush=True)
def step():
    while not os.path.exists(os.environ["SLURM_SUBMIT_DIR"] + "/go"):
        time.sleep(0.05)
step()
print("end", os.environ["RANK"], flush=True)
sys.exit(3 if sys.argv[1:] == ["fail"] else 0)
"""
FILES = {"train.py": PROGRAM, "pkg/__init__.py": "", "pkg/model.py": "NAME = 'first'\n"}


class Laptop:
    """A machine of its user, without Slurm, with a project; and the login node n0, where jobs run in ``work``."""

    def __init__(self, cluster: Slurm, servers: Sshd, folder: Path) -> None:
        self.cluster, self.servers, self.folder = cluster, servers, folder
        self.project, self.work = make_project(folder / "wine", FILES), folder / "work"
        self.work.mkdir()
        cluster.folder = self.work
        self.via = ("--via", f"n0:{self.work}")
        self.host = cluster.network.hosts[-1]
        self.host.run("mkdir", "-p", "-m", "700", OWN)

    def type(self, *words: str | Path, env: Mapping[str, str] | None = None, keys: str = "") -> CommandResult:
        """Run a command to its end; ``keys``: its stdin."""
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "XDG_RUNTIME_DIR": OWN}
        environ = {**clean_environment(), **state, **self.servers.environment, **(env or {})}
        environ = {name: value for name, value in environ.items() if value and not name.startswith(("SLURM", "SBATCH"))}
        stdin = write_program(self.folder, "keys", keys)
        with stdin.open() as file:
            process = self.host.type(ddplaunch_command(*words), self.project, environ, stdin=file)
            out, err = process.communicate(timeout=scaled_timeout(100))
        return CommandResult(process.returncode, out, err)

    def submit(self, *words: str | Path) -> int:
        done = self.type("submit", *self.via, *words)
        assert done.code == 0, done.err
        return int(re.findall(r"^job (\d+):", done.out, re.MULTILINE)[0])

    def state(self, job: int, env: Mapping[str, str] | None = None) -> str:
        """Its state in ``ps --json``."""
        rows = json.loads(self.type("ps", "--json", env=env).out)
        return str(next(row["state"] for row in rows if row["run"] == str(job)))

    def copies(self) -> list[str]:
        return [path.name for path in (self.work / ".ddplaunch/code").glob("*") if path.is_dir()]


@pytest.fixture(scope="module")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Slurm, Sshd]]:
    if reason := unsupported() or no_sshd():
        pytest.skip(f"NO SLURM OR SSHD HERE: {reason}")
    folder = tmp_path_factory.mktemp("via")
    with Network(3) as network, Slurm(network, folder) as cluster:
        yield cluster, Sshd(network, folder / "ssh", cluster.environment)


@pytest.fixture
def laptop(_hosts: tuple[Slurm, Sshd], tmp_path: Path) -> Iterator[Laptop]:
    cluster, servers = _hosts
    yield Laptop(cluster, servers, tmp_path)
    cluster.run("scancel", "--me", check=False)
    cluster.wait_until_idle()


def test_a_job_from_its_submission_to_its_report(laptop):
    """It runs what was submitted; later commands, also without --via, know where it is."""
    cluster, project = laptop.cluster, laptop.project
    done = laptop.type("submit", *laptop.via, "--code", ".", "--nodes", "2", "--exclusive", *LIGHT, "train.py")
    assert done.code == 0, done.err
    job = int(re.findall(r"^job (\d+): train.py on 2 nodes$", done.out, re.MULTILINE)[0])
    copy, commit = re.findall(r"^code: 4 files, .*: (\w{16}) of .*/wine, commit (\w{12})$", done.out, re.MULTILINE)[0]
    assert done.out.splitlines()[-2:] == [f"follow: ddplaunch attach {job}", f"cancel: ddplaunch stop {job}"]
    assert f"log: {laptop.work}/slurm-{job}.out" in done.out
    (project / "pkg/model.py").write_text("NAME = 'edited'\n")
    cluster.wait_for(job, "runs first", 2)
    assert f"runs first 0 {copy}" in cluster.output(job)
    assert laptop.copies() == [copy]

    assert laptop.state(job) == "is running"
    rows = [line.split() for line in laptop.type("ps").out.splitlines()]
    assert [str(job), "running"] in [row[:2] for row in rows], rows
    assert "step" in laptop.type("stacks", str(job)).out
    (laptop.work / "go").touch()
    waited = laptop.type("wait", str(job))
    assert waited.code == 0, waited.err
    assert waited.err.splitlines() == [
        f"ddplaunch: job {job} was submitted on n0; connecting over SSH",
        f"job {job} completed (exit code 0)",
    ]
    for words in (("logs",), ("attach",), ("logs", "-f")):
        shown = laptop.type(*words, str(job))
        assert (shown.code, shown.out.count("runs first"), shown.out.count("end ")) == (0, 2, 2), shown
    assert laptop.state(job) == "completed (exit code 0)"
    report = laptop.type("report", "train.py").out
    assert f"  code {copy} of {project}, commit {commit}" in report
    stopped = laptop.type("stop", str(job))
    assert (stopped.code, f"Error: job {job} completed (exit code 0)" in stopped.err) == (2, True)
    assert "edited" not in cluster.output(job)


def test_what_the_ranks_of_a_job_do(laptop):
    """top, profile and debug pass on what the login node prints, and what is typed here."""
    job = laptop.submit("--code", ".", "--nodes", "2", "--exclusive", "--debug", *LIGHT, "train.py")
    laptop.cluster.wait_for(job, "runs first", 2)
    number = str(job)
    top = laptop.type("top", number)
    assert (top.code, "running: 2 ranks" in top.out) == (0, True), top
    profile = laptop.type("profile", number, "--seconds", "0.5")
    assert (profile.code, "step" in profile.out) == (0, True), profile
    traces = re.findall(r"\S+\.json\b", profile.out + profile.err)
    assert traces, profile
    debugged = laptop.type("debug", number, "--rank", "1", keys="p 'rank', os.environ['RANK'] + '!'\nc\n")
    assert (debugged.code, "('rank', '1!')" in debugged.out) == (0, True), debugged
    (laptop.work / "go").touch()
    assert laptop.type("wait", number).code == 0


def test_follow_and_a_failure(laptop):
    """The exit code is the job's; equal code is sent once."""
    (laptop.work / "go").touch()
    for _ in range(2):
        done = laptop.type("submit", *laptop.via, "--code", ".", "--follow", *LIGHT, "train.py", "--", "fail")
        assert (done.code, "end 0" in done.out) == (3, True), done
        assert "failed (exit code 3)" in done.err
    assert len(laptop.copies()) == 1


def test_stop_a_job_without_a_copy_of_the_code(laptop):
    """Its files are on the login node; the defaults of the laptop apply."""
    make_project(laptop.work, {**FILES, "train.py": PROGRAM})
    via = f'[tool.ddplaunch.submit]\nvia = "{laptop.via[1]}"\npartition = "high"\nexclusive = true\n'
    (laptop.project / "pyproject.toml").write_text(via)
    done = laptop.type("submit", *LIGHT, "train.py")
    assert done.code == 0, done.err
    assert "ddplaunch: partition: high (" in done.err
    job = int(re.findall(r"^job (\d+):", done.out, re.MULTILINE)[0])
    laptop.cluster.wait_for(job, "runs first 0 work")
    assert laptop.cluster.show(job)["Partition"] == "high"
    stopped = laptop.type("stop", str(job))
    assert (stopped.code, "was cancelled" in stopped.err) == (0, True), stopped
    assert "was cancelled" in laptop.state(job)
    plain = {"PATH": "/usr/bin:/bin"}  # whose ssh knows no n0
    assert "was cancelled" in laptop.state(job, plain), "it is recorded, and not asked again"


def test_a_login_node_that_does_not_answer(laptop):
    job = laptop.submit("--code", ".", "--sbatch-arg=--hold", *LIGHT, "train.py")
    assert laptop.state(job).startswith("waits: JobHeldUser") or "hold it" in laptop.state(job)
    plain = {"PATH": "/usr/bin:/bin"}
    assert laptop.state(job, plain) == "is unknown: n0 does not answer"
    lost = laptop.type("wait", str(job), env=plain)
    assert (lost.code, "Error: ssh cannot connect to n0" in lost.err, "not affected" in lost.err) == (69, True, True)
    assert laptop.type("stop", str(job)).code == 0


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (("--via", "nosuch", "train.py"), 69, "ssh cannot connect to nosuch: ", "ssh nosuch true"),
        (("--remote-python", "/usr/bin/python3", "train.py"), 2, "via n0: ddplaunch is not installed", "--version"),
        (("--remote-python", "/no/python", "train.py"), 2, "via n0: env: '/no/python': No such file", "--version"),
        (("--via", "n0:/no/folder", "train.py"), 2, "n0: /no/folder: No such file", "mkdir -p /no/folder"),
        (("--scheduler", "lsf", "train.py"), 2, "n0 has no bsub on PATH", "~/.bashrc"),
        (("--partition", "nosuch", "train.py"), 2, "sbatch rejected the job", "sinfo -s"),
        (("--nodes", "none", "train.py"), 2, "--nodes none: expected a number of nodes", ""),
        (("missing.py",), 2, "missing.py", ""),
        (("--dry-run", "train.py"), 2, "--dry-run does not work with --via n0", "leave --via out"),
        (("--follow", "--array", "0-3", "train.py"), 2, "--follow does not work with --array", ""),
    ],
)
def test_what_is_refused(laptop, words, code, message, hint):
    """Nothing is left: no job, no copy of the code, no record."""
    done = laptop.type("submit", *laptop.via, "--code", ".", *LIGHT, *words, env={"PYTHONPATH": ""})
    assert (done.code, done.out) == (code, ""), done
    refusal = done.err[done.err.index("Error: ") :]
    assert (message in refusal, hint in refusal) == (True, True), done.err
    assert len(refusal.splitlines()) <= 3
    assert "Traceback" not in done.err
    assert (laptop.copies(), json.loads(laptop.type("ps", "--json").out)) == ([], [])
    assert laptop.cluster.run("squeue", "-h", "--me") == ""


def test_an_array(laptop):
    (laptop.work / "go").touch()
    job = laptop.submit("--code", ".", "--array", "0-1", *LIGHT, "train.py")
    wait_until(lambda: laptop.state(job) == "2 completed", "the end of both", 60)
    assert laptop.type("logs", f"{job}_1").out.count("end 0") == 1
    assert laptop.type("wait", str(job)).code == 0


def test_remote_python_alone_is_refused(laptop):
    done = laptop.type("submit", "--remote-python", sys.executable, "train.py")
    assert (done.code, "works only with --via" in done.err) == (2, True)
    assert git(laptop.project, "status", "--porcelain") == ""
