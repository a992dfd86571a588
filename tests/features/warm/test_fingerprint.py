"""Tests of when a run may use a warm zygote: inherited state, and files that imports read, must be the same."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import ddplaunch
from ddplaunch.features.warm.fingerprint import compute_fingerprint
from tests.conftest import run_command, wait_until, write_program
from tests.features.warm.conftest import ROOT, Shell, wait_for_exit

needs_root = pytest.mark.skipif(not ROOT, reason="only root may change it")


def python(text: str) -> str:
    """A command that executes statements, and then the command that follows."""
    return shlex.join([sys.executable, "-c", f"import ctypes, os, sys; {text}; os.execvp(sys.argv[1], sys.argv[1:])"])


DIFFERENT = {
    "a variable": "FOO=1",
    "umask": "umask 027;",
    "niceness": "nice -n 3",
    "affinity": "taskset -c 0",
    "a limit": "ulimit -c 0; ulimit -n 500;",
    "the soft limit of open files": "prlimit --nofile=600:",
    "folder": "cd / &&",
    "an ignored signal": "trap '' USR1;",
    "oom score": "choom -n 500 --",
    "scheduling": "chrt --batch 0",
    "io priority": "ionice -c 3",
    "personality": "setarch -R",
    "no new privileges": "setpriv --no-new-privs",
    "timer slack": python("ctypes.CDLL(None).prctl(29, 12345)"),
    "core dumps": python("open('/proc/self/coredump_filter', 'w').write('0x31')"),
    "groups": "setpriv --groups 7",
    "capabilities": "setpriv --bounding-set -sys_time",
    "a namespace": "unshare --uts",
    "host name": "unshare --uts sh -c 'hostname elsewhere; exec \"$@\"' -",
    "keyring": python("assert ctypes.CDLL(None).syscall(250, 1, None) > 0"),
}
AS_ROOT = {"groups", "capabilities", "a namespace", "host name"}


FINGERPRINT = """
import json, os
from ddplaunch.features.warm.fingerprint import compute_fingerprint

config = {"modules": ["torch"], "import_environment": {}, "shielded_signals": []}
print(json.dumps(compute_fingerprint("zygote.py", config, os.environ)))
"""


def fingerprint_in(folder: Path, before: str = "") -> object:
    """The fingerprint of a process that a shell starts with ``before``."""
    command = shlex.join([sys.executable, "-c", FINGERPRINT])
    return json.loads(run_command(["sh", "-c", f"{before} {command}"], folder).stdout)


@pytest.mark.slow
def test_processes_with_equal_state_have_equal_fingerprints(tmp_path):
    assert fingerprint_in(tmp_path) == fingerprint_in(tmp_path, "TERM=x OLDPWD=/")


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param(each, marks=[needs_root] * (each in AS_ROOT)) for each in DIFFERENT])
def test_inherited_state_changes_the_fingerprint(tmp_path, what):
    before = DIFFERENT[what]
    if not before.endswith((";", "&&")) and run_command(["sh", "-c", f"{before} true"], tmp_path).returncode:
        pytest.skip(f"{before} fails here")
    assert fingerprint_in(tmp_path, before) != fingerprint_in(tmp_path)


@needs_root
@pytest.mark.slow
def test_another_cgroup_changes_the_fingerprint(tmp_path):
    parents = [Path("/sys/fs/cgroup", name) for name in ("pids", "unified", "")]
    group = next((each for each in parents if (each / "cgroup.procs").exists()), Path("/")) / f"warm-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        assert fingerprint_in(tmp_path, f"echo 0 >{group}/cgroup.procs;") != fingerprint_in(tmp_path)
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the end of all in the cgroup")
        group.rmdir()


@pytest.mark.slow
def test_a_run_that_differs_starts_cold(shared: Shell):
    """A run with another environment starts cold, except for variables of the terminal, which reach the ranks."""
    usual = shared.run().made
    other = shared.run(before="FOO=1")
    assert other.code == 0, other.stderr
    assert other.made != usual
    names = {"OLDPWD": "/", "SHLVL": "7", "TERM": "dumb", "TERM_PROGRAM": "x", "SSH_TTY": "/dev/pts/9", "COLUMNS": "3"}
    program = f"import os, torch\nprint('made', torch.made, [os.environ[name] for name in {[*names]}], flush=True)\n"
    write_program(shared.folder, "prints.py", program)
    variables = " ".join(f"{name}={value}" for name, value in names.items())
    done = shared.run(f"{variables} {shared.launch('prints.py')}")
    assert done.made == usual, "the first zygote stays"
    assert done.stdout.count(f" {[*names.values()]}\n") == 2


def test_variables_of_the_terminal_change_the_fingerprint_if_packages_may_read_them():
    config: Any = {"modules": ["torch", "rich"], "import_environment": {}, "shielded_signals": []}

    def fingerprint(**variables: str) -> object:
        return compute_fingerprint("zygote.py", config, {"HOME": "/", **variables})

    usual = fingerprint(TERM="xterm", COLUMNS="80")
    assert fingerprint(TERM="xterm", COLUMNS="80", SSH_TTY="/dev/pts/3", TERM_PROGRAM="x") == usual
    for name, value in (("TERM", "dumb"), ("COLUMNS", "3")):
        assert fingerprint(**{"TERM": "xterm", "COLUMNS": "80", name: value}) != usual
    assert fingerprint(COLUMNS="80") != usual
    config["modules"] = ["torch", "torch._dynamo"]
    assert fingerprint(TERM="xterm") == fingerprint(COLUMNS="80")


@pytest.mark.slow
def test_a_descriptor_near_the_limit_of_open_files_starts_cold(shared: Shell):
    """Beside a descriptor with this number the zygote could not receive all descriptors of the ranks."""
    near = python("os.dup2(0, 595); import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 4096))")
    done = shared.run(f"{near} {shared.launch('--log-dir', 'near', 'shows.py')}")
    assert done.code == 0, done.stderr
    reason = "ranks inherit descriptor 595, too close to the limit of open files (ulimit -n)"
    assert shared.reasons("near") == [reason]


@pytest.mark.ci
def test_a_changed_module_or_one_that_was_missing_ends_it(shell: Shell):
    write_program(shell.modules, "helper.py", "value = 1\n")
    shell.torch_also("import helper\ntry:\n    import extra\nexcept ImportError:\n    extra = None\n")
    prints = (
        "import helper, torch\nprint('made', torch.made, 'value', helper.value, torch.extra is not None, flush=True)\n"
    )
    write_program(shell.folder, "prints.py", prints)
    first = shell.run(shell.launch("prints.py")).made
    write_program(shell.modules, "unrelated.py", "")
    assert shell.run(shell.launch("prints.py")).made == first
    write_program(shell.modules, "helper.py", "value = 22\n")
    changed = shell.run(shell.launch("--log-dir", "log", "prints.py"))
    assert changed.stdout.count("value 22 False") == 2
    assert changed.made != first
    assert str(shell.modules / "helper.py") in shell.reasons("log")[0]
    wait_for_exit(first)
    kept = shell.run(shell.launch("prints.py")).made
    write_program(shell.modules, "extra.py", "")
    added = shell.run(shell.launch("prints.py"))
    assert added.stdout.count("value 22 True") == 2
    assert added.made != kept


@pytest.mark.ci
def test_settings_that_an_import_may_have_read_end_it(shell: Shell):
    """A new or changed file of settings ends the warm zygote; the next run but one uses a new one."""
    kept = shell.run().made
    for name, text in (("matplotlibrc", "{}"), (".config/fsspec/conf.json", "{}"), ("matplotlibrc", "{ }")):
        write_program(shell.folder, name, text)
        assert shell.run().made != kept, name
        kept = shell.run().made
    assert shell.run().made == kept


@pytest.mark.ci
def test_a_new_pth_file_ends_it(shell: Shell, tmp_path):
    """A new .pth file in site-packages ends the warm zygote."""
    shell.run(shlex.join([sys.executable, "-m", "venv", "--without-pip", "env"]))
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (site / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    (site / "ddplaunch.pth").write_text(f"{Path(ddplaunch.__file__).parents[1]}\n")
    launch = f"env/bin/python {shell.launch('shows.py')}"
    first = shell.run(launch)
    assert shell.run(launch).made == first.made
    (site / "new.pth").write_text("/srv/new\n")
    assert shell.run(launch).made != first.made


@pytest.mark.ci
def test_a_user_file_that_has_the_name_of_a_loaded_module_is_imported(shell: Shell):
    first = shell.run()
    write_program(shell.folder, "json.py", "MINE = 'mine'\n")
    write_program(shell.folder, "prints.py", "import torch, json\nprint('made', torch.made, json.MINE, flush=True)\n")
    done = shell.run(shell.launch("prints.py"))
    assert done.stdout.count(f"made {first.made} mine\n") == 2, done.stderr
