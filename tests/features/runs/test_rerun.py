"""Tests of ``rerun``: the command of an earlier run or job again, with changes, also at its commit."""

from __future__ import annotations

import shlex
import shutil
import sys

import pytest

from ddplaunch.features.runs.rerun import OptionTable, replace_arguments
from ddplaunch.features.runs.worktree import target_in_worktree
from ddplaunch.observe.history import history_store
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from tests.conftest import assert_refused, write_program
from tests.features.runs.test_provenance import git, project  # noqa: F401, a fixture
from tests.observe.history.test_history import keep
from tests.start_modes import LIGHT

pytestmark = pytest.mark.usefixtures("state")

TRAIN = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in", os.path.basename(os.getcwd()), *sys.argv[1:])
"""


@pytest.fixture
def first(run_ddplaunch, project):  # noqa: F811
    """A run of two ranks in a repository; its name."""
    write_program(project, "train.py", TRAIN)
    git(project, "commit", "-qam", "train")
    words = (*LIGHT, "--nproc", "2", "--run-id", "first", "train.py", "--lr", "0.1", "--amp")
    done = run_ddplaunch("run", *words, cwd=project)
    assert done.returncode == 0, done
    return "first"


def printed(done):
    assert done.returncode == 0, done
    return sorted(done.stdout.splitlines())


def test_the_same_again_from_any_folder(run_ddplaunch, first, project):  # noqa: F811
    done = run_ddplaunch("rerun", first)
    assert printed(done) == [f"[{n}] rank {n} of 2 in project --lr 0.1 --amp" for n in range(2)]
    command, folder, same = done.stderr.splitlines()[:3]
    assert command == f"ddplaunch: ddplaunch run {shlex.join(LIGHT)} --nproc 2 --run-id first train.py --lr 0.1 --amp"
    assert folder == f"ddplaunch: in {project}"
    assert same == "ddplaunch: commit, changes, versions and machine are as for first"
    latest = history_store.read_run_record("first.2")
    assert latest is not None
    assert latest.argv[1:] == tuple(shlex.split(command)[2:])
    assert printed(run_ddplaunch("rerun", "first.2", "--lr", "0.3"))[0].endswith("--amp --lr 0.3")


def test_options_and_arguments_replace_those_of_then(run_ddplaunch, first, project):  # noqa: F811
    (project / "train.py").write_text(f"{TRAIN}# changed\n")
    done = run_ddplaunch("rerun", "--nproc", "1", "--run-id=other", first, "--lr=0.2", "--seed", "7", cwd=project)
    assert "rank 0 of 1 in project --amp --lr=0.2 --seed 7" in done.stdout
    assert "--nproc 1 --run-id=other train.py --amp --lr=0.2 --seed 7" in done.stderr
    now = git(project, "rev-parse", "HEAD")[:12]
    assert f"commit: {now} on main then, {now} on main, 1 file changed now" in done.stderr
    assert "changes: none then, version 1 now" in done.stderr
    assert "other" in history_store.list_runs()


def test_the_code_of_then(run_ddplaunch, run_in_fork, project, state):  # noqa: F811
    """In a worktree with the commit and the changes of then, also if the program is gone since."""
    write_program(project, "part/train.py", TRAIN)
    git(project, "add", ".")
    git(project, "commit", "-qm", "train")
    (project / "part" / "train.py").write_text(TRAIN.replace('"rank"', '"changed rank"'))
    write_program(project, "part/notes.txt", "")
    words = ("--run-id", "old", "train.py")
    assert run_ddplaunch("run", *LIGHT, *words, cwd=project / "part").returncode == 0
    git(project, "rm", "-rfq", "part")
    git(project, "commit", "-qm", "gone")
    shutil.rmtree(project / "part", ignore_errors=True)
    refused = assert_refused(run_in_fork("rerun", "old"), "the folder of old cannot be used", "--commit runs it in")
    assert "No such file" in refused
    done = run_ddplaunch("rerun", "--commit", "old")
    assert printed(done) == ["changed rank 0 of 1 in part"]
    assert "the worktree lacks what git did not track: part/notes.txt" in done.stderr
    (tree,) = (state / "ddplaunch" / "worktrees").iterdir()
    assert git(tree, "rev-parse", "HEAD") == git(project, "rev-parse", "HEAD~1")
    assert printed(run_ddplaunch("rerun", "--commit", "old.2")) == printed(done)
    assert [*tree.parent.iterdir()] == [tree]  # it has the same code, so it is used again
    git(tree, "checkout", "-qf", "main~2")
    assert_refused(run_in_fork("rerun", "--commit", "old"), "is not at commit", "git worktree remove")


@pytest.mark.parametrize("typed", ["project/train.py", "{link}/train.py", "{project}/train.py"])
def test_the_code_of_then_from_any_folder(run_ddplaunch, project, tmp_path, typed):  # noqa: F811
    """Also if the repository is below the folder, or the program was typed through a symbolic link."""
    write_program(project, "train.py", TRAIN)
    git(project, "commit", "-qam", "train")
    link = tmp_path / "link"
    link.symlink_to(project)
    words = ("--run-id", "old", typed.format(link=link, project=project))
    assert run_ddplaunch("run", *LIGHT, *words, cwd=tmp_path).returncode == 0
    write_program(project, "train.py", "print('the code of today')")
    assert printed(run_ddplaunch("rerun", "--commit", "old")) == [f"rank 0 of 1 in {tmp_path.name}"]


def test_a_module_of_today_does_not_run_as_the_code_of_then(run_ddplaunch, run_in_fork, project, tmp_path):  # noqa: F811
    """From a folder above the repository, a module is that of today."""
    write_program(project, "train.py", TRAIN)
    git(project, "commit", "-qam", "train")
    assert run_ddplaunch("run", *LIGHT, "--run-id", "old", "-m", "project.train", cwd=tmp_path).returncode == 0
    what = "project.train, the program of old, is not in the worktree with its commit"
    assert_refused(run_in_fork("rerun", "--commit", "old"), what, "leave --commit out")


@pytest.mark.parametrize(
    ("target", "folder", "expected"),
    [
        ("train.py", "{root}", "train.py"),
        ("train.py:main", "{root}/part", "train.py:main"),
        ("part/train.py:main", "{root}", "part/train.py:main"),
        ("{root}/train.py:main", "/", "{tree}/train.py:main"),
        ("root/train.py:main", "{above}", "{tree}/train.py:main"),
        ("alias/train.py", "{above}", "{tree}/train.py"),
        ("train.py", "{above}/alias", "train.py"),
        ("{above}/alias/train.py", "{root}", "{tree}/train.py"),
        ("package.train", "{root}", "package.train"),
        ("/usr/bin/env", "{root}", "/usr/bin/env"),
        ("../other.py", "{root}", None),
        ("{above}/other.py", "{root}", None),
        ("package.train", "{above}", None),
        ("/usr/bin/env", "{above}", None),
        ("installed.train", "{root}", None),  # its folder is on sys.path
    ],
)
def test_the_target_in_the_worktree(tmp_path, monkeypatch, target, folder, expected):
    """None, where another file or that of today would run."""
    above, root, tree = tmp_path / "above", tmp_path / "above" / "root", tmp_path / "trees" / "root"
    for path in (root, tree):
        write_program(path, "package/train.py", "")
        write_program(path, "src/installed/train.py", "")
    (above / "alias").symlink_to(root)
    monkeypatch.setattr("sys.path", [*sys.path, str(root / "src")])
    names = {"above": above, "root": root, "tree": tree}
    found = target_in_worktree(target.format(**names), folder.format(**names), str(root), str(tree))
    assert found == (expected and expected.format(**names))


def test_a_hook_of_git_does_not_change_the_worktree(run_ddplaunch, first, tmp_path):
    env = {"GIT_DIR": str(tmp_path / "other"), "GIT_INDEX_FILE": str(tmp_path / "index")}
    done = run_ddplaunch("rerun", "--commit", first, env=env)
    assert len(printed(done)) == 2


def test_a_program_that_is_gone(run_in_fork, first, project):  # noqa: F811
    (project / "train.py").unlink()
    commit = git(project, "rev-parse", "HEAD")[:12]
    hint = f"--commit runs it as of commit {commit}"
    assert_refused(run_in_fork("rerun", first), "train.py, the program of first, is gone", hint)


def test_a_dry_run_starts_nothing(run_in_fork, first):
    done = run_in_fork("rerun", "--nproc", "3", "--dry-run", first)
    assert done.returncode == 0
    assert "3" in done.stdout
    assert history_store.list_runs() == ["first"]


def test_the_other_nodes_are_left_to_the_user(run_in_fork, tmp_path, monkeypatch):
    write_program(tmp_path, "train.py", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", shlex.split("ddplaunch run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py")
    )
    keep(run_id="r", node=1)
    done = run_in_fork("rerun", "--dry-run", "r")
    assert done.returncode == 0, done
    assert "r ran on 2 nodes: type the command of each on the others" in done.stderr


def test_secrets_are_given_again(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", TRAIN)
    words = ("--run-id", "r", "--token", "swordfish", "train.py", "--api-key", "abcdefgh", "--lr", "1")
    assert run_ddplaunch("run", *LIGHT, *words).returncode == 0
    what = "the value of --token is not recorded with r, as it looks like a secret"
    assert_refused(run_in_fork("rerun", "r"), what, "give it again: ddplaunch rerun --token VALUE r")
    env = {"DDPLAUNCH_TOKEN": "swordfish"}
    what = "the value of --api-key is not recorded with r"
    assert_refused(run_in_fork("rerun", "r", env=env), what, "ddplaunch rerun r --api-key VALUE")
    done = run_ddplaunch("rerun", "--run-id", "s", "r", "--api-key", "other-key", env=env)
    assert "--lr 1 --api-key other-key" in done.stdout


def test_refusals(run_in_fork, first, project, monkeypatch):  # noqa: F811
    assert_refused(run_in_fork("rerun"), "the name of the run is missing", "ddplaunch ps --all lists them")
    assert_refused(run_in_fork("rerun", "nope"), 'no run named "nope"')
    assert_refused(run_in_fork("rerun", "--frobnicate", first), "no such option: --frobnicate", "come before RUN")
    assert_refused(run_in_fork("rerun", "--nproc"), "--nproc needs a value")
    assert_refused(run_in_fork("rerun", "--nproc", "x", first), "--nproc x: expected")
    monkeypatch.setattr("sys.argv", ["notebook", "--port", "1"])
    keep(run_id="bare")
    assert_refused(run_in_fork("rerun", "bare"), "bare was not started by ddplaunch run or submit")
    shutil.rmtree(project)
    assert_refused(run_in_fork("rerun", "--commit", first), "the repository of first does not exist any more")


def submitted(folder, *words: str, **fields) -> None:
    job = SubmittedJob(
        number="4711", cluster=None, name="train", target="train.py", nodes=1, array=None, cwd=str(folder), log="",
        run_id=None, python="python", image=None, moment=1.0, code=0, argv=("ddplaunch", *words), **fields,
    )  # fmt: skip
    submitted_jobs.save_job(job)


def test_a_submitted_job_is_submitted_again(run_in_fork, tmp_path):
    write_program(tmp_path / "p", "train.py", "")
    words = ("submit", "--nodes", "2", "-t", "4h", "--grace", "5", "train.py", "--lr", "1")
    submitted(tmp_path, *words, typed_in=str(tmp_path / "p"))
    done = run_in_fork("rerun", "-N", "3", "--dry-run", "4711", "--lr", "2")
    assert done.returncode == 0, done
    assert "ddplaunch: ddplaunch submit -t 4h --grace 5 -N 3 --dry-run train.py -- --lr 2\n" in done.stderr
    assert "#SBATCH --nodes=3\n" in done.stdout
    assert "#SBATCH --time=4:00:00\n" in done.stdout


def test_a_job_of_an_earlier_version(run_in_fork, tmp_path):
    submitted(tmp_path)
    assert_refused(run_in_fork("rerun", "4711"), "the command of 4711 is not recorded", "type it again")


def test_a_run_within_a_job(run_in_fork, tmp_path, monkeypatch):
    """Its command is that of the nodes, so the submission is what is typed again."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    keep(run_id="4711.0")
    monkeypatch.delenv("SLURM_JOB_ID")
    what = "4711.0 ran in job 4711, which was not submitted by ddplaunch on this machine"
    assert_refused(run_in_fork("rerun", "4711.0"), what, "submit its script again")
    write_program(tmp_path, "train.py", "")
    submitted(tmp_path, "submit", "train.py", typed_in=str(tmp_path))
    done = run_in_fork("rerun", "--dry-run", "4711.0")
    assert "ddplaunch submit --dry-run train.py" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("--lr 0.1 x", "--lr 0.2", "x --lr 0.2"),
        ("--lr=0.1 x", "--lr 0.2", "x --lr 0.2"),
        ("--lr 0.1 --amp x", "--amp", "--lr 0.1 x --amp"),
        ("lr=0.1 model=big", "lr=0.2", "model=big lr=0.2"),
        ("a b", "c", "a b c"),
        ("--tag a --tag b", "--tag c", "--tag c"),
    ],
)
def test_arguments_are_replaced_by_name(old, new, expected):
    assert replace_arguments(old.split(), new.split()) == expected.split()


def test_options_are_replaced_whatever_their_spelling():
    table = OptionTable({"-N": True, "--nodes": True, "--merge": False, "--no-merge": False}, {
        "-N": "nodes", "--nodes": "nodes", "--merge": "merge", "--no-merge": "merge",
    })  # fmt: skip
    assert table.replace_options(["-N", "2", "--merge"], ["--nodes=3"]) == ["--merge", "--nodes=3"]
    assert table.replace_options(["-N", "2", "--merge"], ["--no-merge"]) == ["-N", "2", "--no-merge"]
