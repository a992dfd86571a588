"""Tests of ``submit --scheduler kubernetes --code`` and ``manifest --code``: a job runs what was submitted."""

import os
import re

import pytest

from tests.conftest import assert_refused, wait_until, write_program
from tests.features.code.project import git, make_project
from tests.kubernetes.api_server import Fault
from tests.kubernetes.cluster import SUBMIT, TWO, User

pytestmark = pytest.mark.ci

PROGRAM = """
import os, sys, time
from pkg.model import NAME
print("runs", NAME, os.environ["RANK"], "secret" if os.path.exists("../.env") else "clean", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.02)
"""
FILES = {"job/train.py": PROGRAM, "job/pkg/__init__.py": "", "job/pkg/model.py": "NAME = 'first'\n"}


@pytest.fixture
def project(tmp_path):
    project = make_project(tmp_path / "project", FILES, ignored=".env\n")
    (project / ".env").write_text("KEY=1")
    return project


@pytest.fixture
def author(server, project, run_in_fork):
    """A user who types in a folder of the project."""
    author = User(server, server.folder, lambda *words, **options: run_in_fork(*words, cwd=project / "job", **options))
    yield author
    author.close()


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_job_runs_what_was_submitted(author, server, project, tmp_path, kind):
    """Pods that start later, or again, have it too; the ConfigMaps are the job's, and go with it."""
    server.kinds.add("jobsets")
    server.nodes_with_gpus = 0
    go = tmp_path / "go"
    words = (*TWO, "--kind", kind, "--gpus-per-node", "1", "--code", "..", "train.py", "--", str(go))
    done = author.type(*SUBMIT, *words)
    assert done.returncode == 0, done.stderr
    number = re.findall(r"^job (\S+):", done.stdout)[0]
    assert re.search(r"\ncode: 4 files, \d+ B \(\d+ B packed\): \w{16} of .*/project, commit \w{12}\n", done.stdout), (
        done
    )
    (project / "job/pkg/model.py").write_text("NAME = 'edited'\n")
    server.nodes_with_gpus = 8
    for rank in (0, 1):
        author.wait_for(number, f"runs first {rank} clean")
    maps = [each for path, each in server.objects.items() if "/configmaps/" in path]
    assert [(each["immutable"], each["metadata"]["ownerReferences"][0]["name"]) for each in maps] == [
        (True, number.rpartition("/")[2])
    ]
    if kind == "job":
        server.evict(server.list_pods(f"{number}-1-")[0])
        wait_until(lambda: author.type("logs", number).stdout.count("runs first") == 4, "the restart")
    sha = re.findall(r"packed\): (\w{16}) of", done.stdout)[0]
    code = f"  code {sha} of {project}, commit {git(project, 'rev-parse', 'HEAD')[:12]}\n"
    assert code in author.type("report", number).stdout
    assert author.type("stop", number).returncode == 0
    assert server.objects == {}
    assert author.type("report", number).stdout.endswith(f"was deleted (exit code 143)\n{code}")


def test_the_objects_of_a_manifest(author, server, project, tmp_path):
    """``kubectl create``: apply would keep the code in an annotation, which is too small for it."""
    (project / "weights").write_bytes(os.urandom(2 << 20))
    go = tmp_path / "go"
    words = (*TWO, "--job-name", "wine", "--code", "..", "train.py", "--", str(go))
    manifest = author.type("manifest", *SUBMIT[3:], *words).stdout
    assert manifest.startswith("# Written by ddplaunch manifest, for Kubernetes 1.29 or newer.")
    assert "To submit it: kubectl create -f THIS_FILE\n" in manifest
    server.apply(manifest)
    assert len([path for path in server.objects if "/configmaps/wine-code-" in path]) == 3
    author.wait_for("wine", "runs first 1 clean")
    go.touch()
    assert author.type("wait", "wine").returncode == 0


@pytest.mark.parametrize(
    ("size", "words", "message", "hint"),
    [
        (
            9 << 20,
            ("train.py",),
            "/project has 9 MiB packed: Kubernetes gets at most 8 MiB",
            "--container-mounts CLAIM:",
        ),
        (60 << 20, ("train.py",), "5 files have 60 MiB, at most 50 MiB are copied; the largest: weights 60", "ignore"),
        (0, ("missing.py",), "missing.py", ""),
        (0, ("--log-dir", "logs", "train.py"), "--log-dir logs does not work with --code", "absolute path"),
    ],
)
def test_what_is_refused_before_anything_is_created(author, server, project, size, words, message, hint):
    if size > 50 << 20:
        (project / "weights").touch()
        os.truncate(project / "weights", size)
    elif size:
        (project / "weights").write_bytes(os.urandom(size))
    assert_refused(author.type(*SUBMIT, "--code", "..", *words), message, hint)
    assert_refused(author.type("manifest", *SUBMIT[3:], "--code", "..", *words), message, hint)
    assert server.objects == {}


def test_config_maps_are_forbidden(author, server):
    """The job is removed again."""
    message = (
        'configmaps is forbidden: User "jane" cannot create resource "configmaps" in API group "" in the namespace'
    )
    server.faults.append(Fault("POST .*configmaps", 403, "Forbidden", message))
    done = author.type(*SUBMIT, "--code", "..", "train.py", "--", "go")
    assert_refused(
        done, "Error: cannot create configmaps in namespace default: forbidden for jane", "kubectl auth can-i"
    )
    wait_until(lambda: server.objects == {}, "the removal of what was created")


def test_code_that_only_the_image_has(author, server, tmp_path):
    """A module may be in the image; the folder of the copy is where it runs."""
    (tmp_path / "go").touch()
    write_program(tmp_path, "in_image.py", "import os; print('module', sorted(os.listdir('.')), flush=True)")
    env = ("--env", f"PYTHONPATH={tmp_path}")
    number = author.submit(*TWO[2:], *env, "--code", "..", "-m", "in_image")
    author.wait_for(number, "module ['pkg', 'train.py']")
    assert author.type("wait", number).returncode == 0
