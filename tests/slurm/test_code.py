"""Tests of ``submit --code`` with a real Slurm: a job runs what was submitted, and ``clean`` removes the copies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.features.code.project import git, make_project
from tests.slurm.test_attach import Login
from tests.start_modes import LIGHT
from tests.tools.slurm.cluster import Slurm

pytestmark = pytest.mark.ci

PROGRAM = """
import os, time
from pkg.model import NAME
again = os.environ.get("SLURM_RESTART_COUNT")
print("runs", NAME, again, os.path.basename(os.getcwd()), os.environ.get("DDPLAUNCH_CODE"), flush=True)
while not again and os.path.exists(os.environ["SLURM_SUBMIT_DIR"] + "/waits"): time.sleep(0.05)
"""


@pytest.fixture
def login(standing_slurm: Slurm, tmp_path: Path) -> Callable[[], Login]:
    """What a user types in a project, on the login host."""
    files = {"train.py": PROGRAM, "pkg/__init__.py": "", "pkg/model.py": "NAME = 'first'\n"}
    standing_slurm.folder = make_project(tmp_path / "project", files, ignored="waits\n")
    return Login(standing_slurm, tmp_path / "state")


def test_a_job_runs_what_was_submitted(login):
    """Also one that waited meanwhile, and after a requeue; without --code it runs the files as they are then."""
    cluster, project = login.cluster, login.cluster.folder
    (project / "waits").touch()
    before = login.submit("--code", ".", "--exclusive", "--nodes", "2", *LIGHT, "train.py")
    cluster.wait_for(before, "runs first None", 2)
    waiting = login.submit("--code", ".", "--dependency", f"afterany:{before}", *LIGHT, "train.py")
    plain = login.submit("--dependency", f"afterany:{before}", *LIGHT, "train.py")
    assert cluster.state(waiting) == "PENDING"
    commit = git(project, "rev-parse", "HEAD").strip()
    (project / "pkg/model.py").write_text("NAME = 'edited'\n")

    cluster.requeue(before)
    (project / "waits").unlink()
    out = cluster.wait_for(before, "runs first 1", 2)
    name = re.findall(r"runs first 1 (\w{16}) None", out)[0]
    for job in (before, waiting, plain):
        assert cluster.wait(job, timeout=100) == "COMPLETED", cluster.output(job)
    assert f"runs first None {name} None" in cluster.output(waiting)
    assert "runs edited None project None" in cluster.output(plain)
    assert "edited" not in cluster.output(before)

    reported = login.type("report", str(waiting))
    assert f"  code {name} of {project}, commit {commit[:12]}\n" in reported.out, reported.err
    version = json.loads(login.type("report", "--json", str(waiting)).out)["code_version"]
    assert (version["sha"][:16], version["commit"], version["clean"]) == (name, commit, True)
    assert json.loads(login.type("report", "--json", str(plain)).out)["code_version"] is None
    assert ".ddplaunch" not in git(project, "status", "--porcelain")


def test_clean_removes_the_copies_of_ended_jobs(login):
    """Neither that of a job that runs, nor one with files that the program has written."""
    cluster, project = login.cluster, login.cluster.folder
    copies, jobs = {}, {}
    for name, more in (("ended", ""), ("wrote", "open('last.pt', 'w')\n"), ("runs", "while True: time.sleep(1)\n")):
        (project / "train.py").write_text(f"NAME = '{name}'\n{PROGRAM}{more}")
        done = login.type("submit", "--code", ".", *LIGHT, "train.py")
        jobs[name] = int(re.findall(r"^job (\d+):", done.out)[0])
        copies[name] = project / ".ddplaunch/code" / re.findall(r"packed\): (\w+) of", done.out)[0]
    for name in ("ended", "wrote"):
        assert cluster.wait(jobs[name]) == "COMPLETED"
    cluster.wait_for(jobs["runs"], "runs first")
    listed = login.type("clean", "--dry-run")
    assert f"copy of code: {copies['ended']}\n" in listed.out
    assert all(copy.exists() for copy in copies.values())
    cleaned = login.type("clean", "--yes")
    assert f"removed: {copies['ended']}\n" in cleaned.err
    assert f"kept: {copies['wrote']}, where programs have written last.pt\n" in cleaned.err
    assert {name: copy.exists() for name, copy in copies.items()} == {"ended": False, "wrote": True, "runs": True}
    cluster.cancel(jobs["runs"])
    cluster.wait(jobs["runs"])
    assert f"removed: {copies['runs']}\n" in login.type("clean", "--yes").err


def test_a_copy_that_is_gone(login):
    cluster, project = login.cluster, login.cluster.folder
    job = login.submit("--code", ".", "--sbatch-arg=--hold", *LIGHT, "train.py")
    (place,) = (path for path in (project / ".ddplaunch/code").iterdir() if path.is_dir())
    place.rename(project / "elsewhere")
    cluster.run("scontrol", "release", str(job))
    assert cluster.wait(job) == "FAILED"
    assert cluster.output(job) == f"ddplaunch: the copy of the code is gone: {place}\n"


def test_a_full_disk_is_named(login):
    project = login.cluster.folder
    (project / "weights.bin").write_bytes(os.urandom(2 << 20))
    (project / ".ddplaunch").mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1M", "none", str(project / ".ddplaunch")]
    login.cluster.login.run(*mounted)
    try:
        done = login.type("submit", "--code", ".", *LIGHT, "train.py")
    finally:
        login.cluster.login.run("umount", str(project / ".ddplaunch"))
    assert done.err.endswith(f"Error: cannot write the code to {project}/.ddplaunch/code: No space left on device\n")
    assert "job" not in done.out
