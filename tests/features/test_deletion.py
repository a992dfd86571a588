"""Tests that a feature can be deleted with its folder and its line in the list, and all others still work."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddplaunch.cli.click_commands import COMMANDS
from ddplaunch.core.feature_registry import load_features
from ddplaunch.features import OBSERVE
from tests.conftest import assert_refused, clean_environment, run_command, write_program
from tests.debugger_fixtures import runtime_dir as runtime_dir
from tests.package_copy import PACKAGE, copy_package
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import FORKED
from tests.test_imports import FEATURE_IMPORTS

FOLDERS = sorted(
    path.stem
    for path in (PACKAGE / "features").iterdir()
    if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
)

PROGRAM = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
assert sys.argv[1] != "fail" or os.environ["RANK"] != "1", "wrong loss"
time.sleep(600 if sys.argv[1] == "wait" else 0)
"""

REQUIRED = {name: {*FEATURE_IMPORTS.get(name, ())} for name in FOLDERS}
for registered, feature in load_features():
    if registered not in OBSERVE:
        REQUIRED[registered] |= {*feature.requires}


def dependents_of(name: str) -> set[str]:
    """A feature, and those that require it, also by others."""
    found, before = {name}, set[str]()
    while found != before:
        before = found
        found = found | {other for other, required in REQUIRED.items() if required & found}
    return found


DELETIONS = {name: dependents_of(name) for name in FOLDERS}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("copy"))


@contextmanager
def without(package: Path, gone: set[str]) -> Iterator[None]:
    """Take features out of a copy of the package, for a while: their folders and their lines in the list."""
    path = package / "features" / "__init__.py"
    whole = path.read_text()
    aside = package.parent / "aside"
    aside.mkdir()
    paths = [path for name in gone for path in (package / "features").iterdir() if path.stem == name]
    for moved in paths:
        moved.rename(aside / moved.name)
    path.write_text(re.sub(rf'^    "({"|".join(gone)})",\n', "", whole, flags=re.MULTILINE))
    try:
        yield
    finally:
        path.write_text(whole)
        for moved in paths:
            (aside / moved.name).rename(moved)
        aside.rmdir()


def commands_of(gone: set[str]) -> list[str]:
    return [name for name, command in COMMANDS.items() if command.module.split(".")[2] in gone]


def join(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def test_features_form_a_graph_without_circles():
    """Shown with ``-s``: each feature, those that it requires, and those that go with it when it is deleted."""
    for name in FOLDERS:
        imported, gone = FEATURE_IMPORTS.get(name, set()), dependents_of(name) - {name}
        print(
            f"{name}: requires {', '.join(sorted(imported)) or 'none'}; required by {', '.join(sorted(gone)) or 'none'}"
        )
        assert not imported & gone, name


@pytest.mark.ci
@pytest.mark.parametrize("name", DELETIONS)
def test_without_a_feature_the_others_work(name: str, package: Path, tmp_path: Path):
    gone = DELETIONS[name]
    write_program(tmp_path, "train.py", PROGRAM)
    environment = {"PYTHONPATH": str(package.parent), "XDG_STATE_HOME": str(tmp_path / "state")}
    start = [sys.executable, "-m", "ddplaunch"]
    run = ["run", "--nproc", "2", *(() if "preload" in gone else FORKED), "train.py"]

    def type_command(*words: str) -> "subprocess.CompletedProcess[str]":
        return run_command([*start, *words], tmp_path, environment)

    with without(package, gone):
        job = subprocess.Popen(
            [*start, *run, "wait"],
            cwd=tmp_path,
            env=clean_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert job.stdout
            assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] rank 0\n", "[1] rank 1\n"]
            if "ps" in commands_of(gone):
                job.send_signal(signal.SIGINT)
            else:
                shown = type_command("ps")
                assert shown.returncode == 0, shown.stderr
                assert "train.py wait" in shown.stdout
                stopped = type_command("stop", str(job.pid))
                assert stopped.returncode == 0, stopped.stderr
            errors = job.communicate(timeout=scaled_timeout(60))[1]
        finally:
            job.kill()
        assert job.returncode == 130, errors

        done = type_command(*run, "end")
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]

        failed = type_command(*run, "fail")
        assert failed.returncode == 1
        assert "ddplaunch: rank 1 failed with AssertionError: wrong loss (exit code 1)" in failed.stderr
        assert "bug in ddplaunch" not in errors + failed.stderr

        helped = type_command("--help")
        assert helped.returncode == 0, helped.stderr
        listed = re.findall(r"^  (\w+)  +[A-Z]", helped.stdout.partition("Options:")[2], re.MULTILINE)
        assert listed == [name for name in COMMANDS if name not in commands_of(gone)]
        assert type_command("run", "--help-all").returncode == 0
        for command in commands_of(gone)[:1]:
            assert_refused(type_command(command), f'unknown command "{command}"')


@pytest.mark.ci
@pytest.mark.usefixtures("runtime_dir")
def test_without_ssh_the_doctor_and_the_debugger_work_on_this_machine(package: Path, tmp_path: Path):
    write_program(tmp_path, "train.py", "loss = 42\nbreakpoint()\n")
    environment = {"PYTHONPATH": str(package.parent)}
    start = [sys.executable, "-m", "ddplaunch"]
    missing = "needs connections to other hosts, which this ddplaunch does not make"
    with without(package, {"ssh"}):
        examined = run_command([*start, "doctor"], tmp_path, environment)
        assert "Traceback" not in examined.stderr
        assert "all_reduce" in examined.stdout, examined
        assert_refused(run_command([*start, "doctor", "--hosts", "n1,n2"], tmp_path, environment), f"--hosts {missing}")
        assert_refused(run_command([*start, "debug", "--hosts", "n1"], tmp_path, environment), f"--hosts {missing}")

        job = subprocess.Popen(
            [*start, "run", "--nproc", "1", "--run-id", "without-ssh", *FORKED, "--debug", "train.py"],
            cwd=tmp_path,
            env=clean_environment(environment),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert job.stderr
            assert "is at a breakpoint: train.py:2" in job.stderr.readline()
            answered = run_command([*start, "debug", "without-ssh"], tmp_path, environment, input="p loss + 1\nc\n")
            assert "43" in answered.stdout.splitlines(), answered
            assert job.wait(scaled_timeout(60)) == 0
        finally:
            job.kill()
