"""The same test of every scheduler: submit, ps, logs, wait, report, stop."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import Launch, wait_until, write_program
from tests.features.submit.queue_programs import Job
from tests.features.submit.test_jobs_again import Login as QueueLogin
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.cluster import SUBMIT, User
from tests.kubernetes.cluster import unsupported as no_kubectl
from tests.slurm.test_attach import CommandResult, Login
from tests.start_modes import LIGHT
from tests.tools.gridengine import GridEngine
from tests.tools.gridengine import unsupported as no_gridengine
from tests.tools.virtual_hosts.network import Network

pytestmark = pytest.mark.ci

TRAIN = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""


TWO = ("--nodes", "2", "--nproc", "1")


class Site(NamedTuple):
    """A scheduler, and the shell of a user of it."""

    type: Callable[..., CommandResult]
    submit: tuple[str, ...]  # a command for two ranks
    is_here: bool = False  # the queue of this machine: its jobs are runs too, and commands print what they do of runs


@contextmanager
def slurm(folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    cluster = request.getfixturevalue("standing_slurm")
    yield Site(Login(cluster, folder / "state").type, ("submit", "--exclusive", *TWO))


@contextmanager
def sge(folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    if reason := no_gridengine():
        pytest.skip(f"NO GRID ENGINE HERE: {reason}")
    with Network(3) as network, GridEngine(network, folder) as cluster:
        cluster.folder = folder
        yield Site(Login(cluster, folder / "state").type, ("submit", "--scheduler", "sge", "--pe", "spread", *TWO))
        cluster.run("qdel", "-u", "*", check=False)
        cluster.wait_until(lambda: not cluster.run("qstat", "-u", "*"), "an empty queue")


@contextmanager
def queue(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """PBS or LSF, simulated. Each command has the control sockets of a node: they are this machine."""
    with tempfile.TemporaryDirectory() as sockets:  # their paths are short
        login = QueueLogin(name, folder, sockets, request.getfixturevalue("run_in_fork"))

        def type_words(*words: str) -> CommandResult:
            variables = {"XDG_RUNTIME_DIR": sockets} if words[0] == "submit" else {}
            done = login.type(*words, **variables)
            return CommandResult(done.returncode, done.stdout, done.stderr)

        yield Site(type_words, ("submit", "--scheduler", name, *TWO))
        jobs = [Job(folder / "site", path.name) for path in (folder / "site" / "jobs").iterdir()]
        wait_until(lambda: all(job.waits or job.status is not None for job in jobs), "the end of all jobs")


@contextmanager
def local(folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    run: Launch = request.getfixturevalue("run_in_fork")

    def type_words(*words: str) -> CommandResult:
        done = run(*words, env={"XDG_STATE_HOME": str(folder / "state")})
        return CommandResult(done.returncode, done.stdout, done.stderr)

    yield Site(type_words, ("submit", "--scheduler", "local", "--nproc", "2"), is_here=True)


@contextmanager
def kubernetes(folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    if reason := no_kubectl():
        pytest.skip(f"NO KUBECTL HERE: {reason}")
    run: Launch = request.getfixturevalue("run_in_fork")
    server = ApiServer(folder)
    user = User(server, folder, run)

    def type_words(*words: str) -> CommandResult:
        done = user.type(*words)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    try:
        yield Site(type_words, (*SUBMIT, *TWO))
    finally:
        user.close()
        server.stop()


SITES = {
    "slurm": slurm,
    "sge": sge,
    "pbs": lambda folder, request: queue("pbs", folder, request),
    "lsf": lambda folder, request: queue("lsf", folder, request),
    "kubernetes": kubernetes,
    "local": local,
}


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    write_program(tmp_path, "train.py", TRAIN)
    with SITES[request.param](tmp_path, request) as site:
        yield site
        write_program(tmp_path, "go", "")


def submit(site: Site) -> str:
    """Submit a job that waits for the file "go"; return its number, once both ranks run."""
    done = site.type(*site.submit, *LIGHT, "train.py")
    assert done.code == 0, done.err
    number = re.findall(r"^job (\S+): train.py on (?:2 nodes|1 node)$", done.out, re.MULTILINE)[0]
    assert done.out.splitlines()[-2:] == [f"follow: ddplaunch attach {number}", f"cancel: ddplaunch stop {number}"]
    wait_until(lambda: {"rank 0 of 2", "rank 1 of 2"} <= lines_of(site, number), "both ranks")
    return number


def lines_of(site: Site, number: str) -> set[str]:
    """What the ranks have printed, by ``logs``."""
    return {re.sub(r"^\[\d\] ", "", line) for line in site.type("logs", number).out.splitlines()}


def shown(site: Site, number: str) -> dict[str, object]:
    """The job in ``ps --json``."""
    found: list[dict[str, object]] = json.loads(site.type("ps", "--json").out)
    return next(each for each in found if each["run"] == number and each["pid"] is None)


def test_a_job_from_its_submission_to_its_report(site, tmp_path):
    number = submit(site)
    job = shown(site, number)
    assert (job["state"], job["target"], job["code"]) == ("is running", "train.py", None)
    report = site.type("report", number)
    assert (report.code, "running" in report.out + report.err) == (0, True), report

    write_program(tmp_path, "go", "")
    waited = site.type("wait", number)
    assert (waited.code, waited.err.splitlines()[-1:]) == (3, [f"job {number} failed (exit code 3)"]), waited
    assert {"rank 0 of 2", "rank 1 of 2"} <= lines_of(site, number)
    job = shown(site, number)
    assert (job["state"], job["code"]) == ("failed (exit code 3)", 3)
    report = site.type("report", number)
    assert (report.code, "rank 1 exited with code 3" in report.out) == (0, True), report
    again = site.type("stop", number)
    assert (again.code, again.err.splitlines()[0]) == (2, f"Error: job {number} failed (exit code 3)")


def test_a_job_is_stopped(site):
    number = submit(site)
    stopped = site.type("stop", number)
    words = f"stopping {number}: " if site.is_here else f"stopping job {number}\n"
    assert (stopped.code, words in stopped.err) == (0, True), stopped
    job = shown(site, number)
    assert job["code"] in (130, 137, 143), job
    ends = f"{number} has ended" if site.is_here else f"job {number} {job['state']}"
    assert stopped.err.splitlines()[-1] == ends
    waited = site.type("wait", number)
    assert (waited.code, waited.err.splitlines()[-1]) == (job["code"], f"job {number} {job['state']}")
