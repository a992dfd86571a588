"""Tests of what a run's record says that it was: commit, changes, versions, variables; and that it has no secrets."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from ddplaunch.base.redaction import redact_words
from ddplaunch.features.runs import provenance_probe
from ddplaunch.features.runs.provenance import GitState, Provenance, read_diff, read_provenance
from ddplaunch.observe.history import history_store
from ddplaunch.system.git_environ import git_environ
from tests.conftest import wait_until, write_program
from tests.start_modes import FORKED

pytestmark = pytest.mark.usefixtures("state")

TRAIN = "print('trained')\n"


def git(folder: Path, *words: str) -> str:
    """Run git as a user without a configuration; return its output."""
    who = {name: "ada" for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME")}
    who |= {name: "ada@example.org" for name in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL")}
    environ = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", *words], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path):
    """A repository with one commit of train.py."""
    folder = tmp_path / "project"
    write_program(folder, "train.py", TRAIN)
    write_program(folder, ".gitignore", "*.log\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def provenance_of(done: subprocess.CompletedProcess[str]) -> Provenance:
    """What the only run was."""
    assert done.returncode == 0, done
    (name,) = history_store.list_runs()
    found = read_provenance(name)
    assert found is not None
    return found


def test_a_clean_tree(run_ddplaunch, project):
    done = run_ddplaunch("run", *FORKED, "train.py", "--lr", "0.1", cwd=project, env={"MY_SETTING": "swordfish"})
    found = provenance_of(done)
    assert found.git is not None
    assert (found.git.commit, found.git.branch) == (git(project, "rev-parse", "HEAD"), "main")
    assert found.git.root == str(project)
    assert found.git.is_clean
    assert read_diff(*history_store.list_runs()) == b""
    assert found.versions["Python"].startswith("3.")
    assert "msgspec" in found.packages
    assert "MY_SETTING" in found.variables
    assert not {"PATH", "HOME", "DDPLAUNCH_TOKEN"} & {*found.variables}
    stored = Path(history_store.run_dir(*history_store.list_runs())).rglob("*")
    assert not [path for path in stored if b"swordfish" in path.read_bytes()]
    report = run_ddplaunch("report", cwd=project)
    assert f"\n  commit {found.git.commit[:12]} on main\n" in report.stdout
    as_json = json.loads(run_ddplaunch("report", "--json", cwd=project).stdout)
    assert as_json["provenance"]["git"]["commit"] == found.git.commit


def test_changes_can_be_applied_to_the_commit(run_ddplaunch, project, tmp_path):
    """Ignored files are left out, and of files for secrets the content."""
    (project / "train.py").write_text(f"# changed\n{TRAIN}")
    write_program(project, "package/model.py", "WIDTH = 7")
    (project / "torn.py").write_text("last = 'line without a newline'")
    for name in ("ignored.log", ".env", "notes.txt", "my_secret.py"):
        write_program(project, name, "swordfish")
    found = provenance_of(run_ddplaunch("run", *FORKED, str(project / "train.py")))  # from another folder
    assert found.git is not None
    assert found.git.changed == ("train.py",)
    assert {*found.git.new} == {"package/", "torn.py", ".env", "notes.txt", "my_secret.py"}
    assert str(found.git).endswith(" on main, 1 file changed, 5 new")
    diff = read_diff(*history_store.list_runs())
    assert len(diff) == found.git.diff_bytes
    assert b"swordfish" not in diff
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(project), str(copy))
    (tmp_path / "changes").write_bytes(diff)
    git(copy, "apply", str(tmp_path / "changes"))
    for name in ("train.py", "package/model.py", "torn.py"):
        assert (copy / name).read_bytes() == (project / name).read_bytes()


def test_a_large_diff_is_cut_at_a_line(run_ddplaunch, project):
    write_program(project, "large.py", "VALUE = 'a line of a large file'\n" * 50_000)
    write_program(project, "train.py", f"{TRAIN}# changed\n")
    found = provenance_of(run_ddplaunch("run", *FORKED, "train.py", cwd=project))
    assert found.git is not None
    assert found.git.is_diff_cut
    diff = read_diff(*history_store.list_runs())
    assert (1 << 20) - 100 < len(diff) <= 1 << 20
    assert diff.endswith(b"\n")


def test_outside_of_a_repository_git_is_not_called(run_ddplaunch, tmp_path):
    fake = tmp_path / "bin" / "git"
    write_program(fake.parent, "git", "#!/bin/sh\ntouch called\n").chmod(0o755)
    write_program(tmp_path, "train.py", TRAIN)
    found = provenance_of(
        run_ddplaunch("run", *FORKED, "train.py", env={"PATH": f"{fake.parent}:{os.environ['PATH']}"})
    )
    assert (found.git, found.git_error, found.code) == (None, None, "")
    assert not (tmp_path / "called").exists()


def test_without_git_the_rest_is_recorded(run_ddplaunch, project, tmp_path):
    found = provenance_of(run_ddplaunch("run", *FORKED, "train.py", cwd=project, env={"PATH": str(tmp_path)}))
    assert (found.git, found.code) == (None, "commit unknown: git is not installed")
    assert found.packages


def test_a_repository_without_a_commit(run_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", TRAIN)
    git(tmp_path, "init", "-q", "-b", "main")
    found = provenance_of(run_ddplaunch("run", *FORKED, "train.py"))
    assert found.git is not None
    assert (found.git.commit, found.git.new[-1]) == (None, "train.py")
    assert found.code.startswith("no commit yet on main")


def test_git_that_hangs_is_ended_with_the_run(run_ddplaunch, project, tmp_path):
    """A run that is over waits for git, but not long."""
    text = f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n"
    write_program(tmp_path / "bin", "git", text).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    began = time.monotonic()
    found = provenance_of(run_ddplaunch("run", *FORKED, "train.py", cwd=project, env={"PATH": path}))
    assert time.monotonic() - began < 20
    assert found.code == "commit unknown: git had not answered when the run ended"
    assert found.packages
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)


def test_the_text_for_a_launcher_that_died(project):
    git_of_orphan = provenance_probe.GitRunner(str(project), time.monotonic() + 600, parent=-1)
    with pytest.raises(provenance_probe.GitFailed, match=r"^git had not answered when the launcher died$"):
        git_of_orphan.run("status")


def test_a_hook_of_git_does_not_change_the_commit(run_ddplaunch, project, tmp_path):
    """Its variables name the repository and the index of the commit that it is run for."""
    env = {"GIT_DIR": str(tmp_path / "other"), "GIT_INDEX_FILE": str(tmp_path / "index")}
    found = provenance_of(run_ddplaunch("run", *FORKED, "train.py", cwd=project, env=env))
    assert (found.code, "GIT_DIR" in found.variables) == (
        f"commit {git(project, 'rev-parse', 'HEAD')[:12]} on main",
        True,
    )


def test_the_probe_gives_git_the_same_environment():
    """It imports nothing of ddplaunch, so it has that function again."""
    environ = {"GIT_DIR": "x", "GIT_PREFIX": "y", "GIT_CONFIG_COUNT": "1", "GIT_SSH_COMMAND": "ssh", "PATH": "/bin"}
    kept = {name: environ[name] for name in ("GIT_CONFIG_COUNT", "GIT_SSH_COMMAND", "PATH")}
    assert provenance_probe.git_environ(environ) == git_environ(environ) == kept


@pytest.mark.parametrize(
    ("changed", "new", "expected"),
    [
        (1, 0, ", 1 file changed"),
        (2, 3, ", 2 files changed, 3 new"),
        (200, 200, ", 200 or more files changed, 200 or more new"),
    ],
)
def test_the_number_of_files_that_are_listed(changed, new, expected):
    """The lists are cut at a length, at which there may be more."""
    assert (
        str(GitState("/p", "c" * 40, "main", ("a",) * changed, ("b",) * new)) == f"commit {'c' * 12} on main{expected}"
    )


def test_its_process_is_gone_while_the_run_goes_on(start_ddplaunch, tmp_path):
    """Also as a zombie, which a parent that does not wait for it keeps."""
    write_program(tmp_path, "train.py", "import os\n\nprint('up', flush=True)\nos.read(0, 1)\n")
    job = start_ddplaunch("run", *FORKED, "--stdin", "0", "train.py", stdin=subprocess.PIPE)
    job.wait_for("up")
    wait_until(lambda: history_store.list_runs() and read_provenance(history_store.list_runs()[0]), "the record")
    launcher = psutil.Process(job.process.pid)
    wait_until(lambda: len(launcher.children()) == 1, "the end of all children but the zygote")
    job.process.stdin.close()
    assert job.wait() == 0, job.stderr()


def test_only_the_user_can_read_it(run_ddplaunch, project):
    write_program(project, "train.py", f"{TRAIN}# changed\n")
    provenance_of(run_ddplaunch("run", *FORKED, "train.py", cwd=project))
    folder = Path(history_store.run_dir(*history_store.list_runs()))
    files = [path for path in folder.iterdir() if "provenance" in path.name]
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_without_a_history_nothing_is_recorded(run_ddplaunch, project, state):
    assert run_ddplaunch("run", *FORKED, "--no-history", "train.py", cwd=project).returncode == 0
    assert not [path for path in state.rglob("*") if "provenance" in path.name]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": 1}', b'{"host": "a", "python": "3", "git": {}}'])
def test_what_cannot_be_read_is_unknown(state, content):
    folder = state / "ddplaunch" / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "node-0.provenance.json").write_bytes(content)
    assert read_provenance("r") is None


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        ("--token abc train.py", "--token … train.py"),
        ("--token=abc train.py", "--token=… train.py"),
        ("train.py --api-key k1234567 --lr 0.1", "train.py --api-key … --lr 0.1"),
        ("train.py --hf_token=hf_x1234", "train.py --hf_token=…"),
        ("train.py --db.password x", "train.py --db.password …"),
        ("train.py +logger.api_key=abcdef12 lr=1", "train.py +logger.api_key=… lr=1"),
        ("train.py hf_abcdefghijklmnopqrst", "train.py …"),
        ("train.py sk-abcdefghijklmnopqrstuv1", "train.py …"),
        ("train.py --url s3://me:pass@host/x", "train.py --url s3://me:…@host/x"),
        # These are none:
        ("train.py --max-token 512 --pad-token <pad>", None),
        ("train.py --tokenizer gpt2-large --sort-key length", None),
        ("train.py --token-dim 64 --mask_token [MASK]", None),
        ("train.py --password --lr 0.1", "train.py --password --lr 0.1"),
    ],
)
def test_values_of_secrets_are_not_recorded(typed, recorded):
    assert redact_words(typed.split()) == (recorded or typed).split()
