"""Tests of ``--code`` over SSH: what arrives on the hosts, what is not sent again, and what is reported."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.features.code.project import git, make_project
from tests.features.ssh.job import Job, refusal
from tests.features.ssh.sshd import Sshd
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

PROGRAM = """
import os, socket
from pkg.model import NAME
print(NAME, socket.gethostname(), os.getcwd(), sorted(os.listdir(".")), os.environ.get("DDPLAUNCH_CODE"), flush=True)
while os.path.exists(os.environ["WAITS_FOR"]): pass
"""
IGNORED = "job.*\n*.bin\n"  # what the test itself writes


class Project:
    """A project on n0, and hosts that each have a cache of their own, as machines do."""

    def __init__(self, servers: Sshd, folder: Path) -> None:
        self.servers, self.hosts = servers, servers.network.hosts
        files = {"train.py": PROGRAM, "pkg/__init__.py": "", "pkg/model.py": "NAME = 'first'\n", ".env": "geheim"}
        self.folder = make_project(folder / "project", files, ignored=IGNORED)
        self.cache = servers.home / ".cache"
        self.cache.mkdir()

    def mount(self, host: int, size: str) -> None:
        self.hosts[host].run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(self.cache))

    def copies(self, host: int) -> list[str]:
        """The paths below the cache of a host, but for the lists of files."""
        found = self.hosts[host].run("find", str(self.cache), "-type", "f").splitlines()
        return sorted(path for path in found if not path.endswith((".files", ".pyc")))

    def start(self, *words: str, waits_for: str = "/nothing") -> Job:
        names = ",".join(f"{host.name}:1" for host in self.hosts[1:])
        options = ("--hosts", names, "--code", ".", "--env", f"WAITS_FOR={waits_for}", *LIGHT)
        return Job(self.servers, self.folder, *options, *words, "train.py")

    def run(self, *words: str) -> Job:
        job = self.start(*words)
        assert job.wait() == 0, job.stderr()
        return job


@pytest.fixture
def project(sshd, tmp_path):
    made = Project(sshd(3), tmp_path)
    for host in (1, 2):
        made.mount(host, "20M")
    return made


def code_lines(job: Job) -> list[str]:
    return [line for line in job.stderr().splitlines() if "code" in line or "secret" in line]


def test_a_second_run_sends_nothing(project, tmp_path):
    """The hosts run a copy; its program is recorded with its commit; secrets are not sent."""
    first = project.run("--run-id", "first")
    described, secrets, sent = code_lines(first)
    commit = git(project.folder, "rev-parse", "HEAD").strip()
    assert described.startswith("ddplaunch: code: 4 files, ")
    assert described.endswith(f" of {project.folder}, commit {commit[:12]}")
    assert secrets == "ddplaunch: secrets are never copied: .env"
    assert sent == "ddplaunch: the code was sent to n1, n2"
    name = described.partition(" packed): ")[2].split()[0]
    place = f"{project.cache}/ddplaunch/code/{name}"
    files = "['.gitignore', 'pkg', 'train.py']"
    assert sorted(first.stdout().splitlines()) == [
        f"[{rank}] first n{rank + 1} {place} {files} None" for rank in (0, 1)
    ]
    names = (".gitignore", "pkg/__init__.py", "pkg/model.py", "train.py")
    assert project.copies(1) == project.copies(2) == [f"{place}/{name}" for name in names]

    before = project.hosts[1].run("stat", "-c", "%i", place)
    second = project.run("--run-id", "second")
    assert len(code_lines(second)) == 2, second.stderr()
    assert second.stdout().count(place) == 2
    assert project.hosts[1].run("stat", "-c", "%i", place) == before

    (project.folder / "pkg/model.py").write_text("NAME = 'edited'\n")
    third = project.run("--run-id", "third")
    assert code_lines(third)[0].endswith(f"commit {commit[:12]}, with changes")
    assert code_lines(third)[2] == sent
    assert third.stdout().count("edited") == 2

    record = json.loads((project.servers.folder / "state/ddplaunch/runs/first/node-0.jsonl").read_text().split("\n")[0])
    version = record["code_version"]
    assert (version["commit"], version["clean"], version["folder"]) == (commit, True, str(project.folder))
    assert version["sha"].startswith(name)


def test_two_runs_at_once_and_nine_megabytes(project, tmp_path):
    """Both send the code, as no host has it yet; one copy stays. A file that is edited meanwhile changes neither."""
    (project.folder / "weights.dat").write_bytes(bytes(9 << 20))
    gate = tmp_path / "gate"
    gate.touch()
    jobs = [project.start("--master-port", str(port), waits_for=str(gate)) for port in (29400, 29600)]
    for job in jobs:
        job.wait_for("first", 2)
    (project.folder / "pkg/model.py").write_text("NAME = 'edited'\n")
    gate.unlink()
    for job in jobs:
        assert job.wait() == 0, job.stderr()
        assert "5 files, 9 MiB" in job.stderr()
        assert "edited" not in job.stdout()
    assert len(project.copies(1)) == len(project.copies(2)) == 5


def test_a_full_disk_is_named_with_its_host(sshd, tmp_path):
    project = Project(sshd(3), tmp_path)
    project.mount(1, "20M")
    project.mount(2, "1M")
    (project.folder / "weights.dat").write_bytes(bytes(2 << 20))
    job = project.start()
    assert job.wait() == 2
    assert refusal(1, 2) in job.stderr()
    assert f"  n2  cannot write the code to {project.cache}/ddplaunch/code: No space left on device" in job.stderr()
    assert project.copies(2) == []
    job.assert_nothing_left()


def test_a_run_that_is_stopped_while_the_code_is_sent(project):
    """Nothing was started, and no half of a copy has a name."""
    (project.folder / "weights.dat").write_bytes(os.urandom(9 << 20))
    project.hosts[1].cable.narrow("2mbit")
    job = project.start()
    wait_until(lambda: "waiting for n1" in job.stderr(), "the notice")
    job.process.terminate()
    assert job.wait() == 143, job.stderr()
    job.assert_nothing_left()
    assert project.copies(1) == []
    assert len(project.copies(2)) == 5
