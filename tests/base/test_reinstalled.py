"""Tests of commands whose package is installed again, or removed, while they run."""

import shutil
import subprocess
import sys
import time

import pytest

from ddplaunch.base.reinstalled import was_reinstalled
from tests.conftest import clean_environment
from tests.package_copy import START, copy_package
from tests.scaled_timeouts import scaled_timeout

REMOVES_ITSELF = """
import shutil, sys
import ddplaunch.cli

sys.argv = ["ddplaunch", "ps"]
shutil.rmtree("ddplaunch")
ddplaunch.cli.main()
"""


def test_the_files_of_the_package_are_newer_or_gone(tmp_path):
    (tmp_path / "base").mkdir()
    assert was_reinstalled(str(tmp_path))
    for each in (tmp_path, tmp_path / "base"):
        (each / "__init__.py").touch()
    assert was_reinstalled(str(tmp_path), time.time() - 60)
    assert not was_reinstalled(str(tmp_path), time.time() + 60)
    assert not was_reinstalled()


def test_a_command_whose_package_was_removed_says_so(tmp_path):
    copy_package(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REMOVES_ITSELF], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    first, *rest = done.stderr.splitlines()
    assert (done.returncode, rest) == (69, ["  type it again"])
    assert first.startswith("Error: ddplaunch was installed anew or removed while this command ran: ")


WAITS = """
import os, shutil, sys, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(0 if os.path.exists("ends") or os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 3)
"""


@pytest.fixture
def job(tmp_path):
    """Start a job of a copy of the package, and remove the copy once the rank runs."""

    def start(*words: str) -> subprocess.Popen[str]:
        copy_package(tmp_path)
        (tmp_path / "train.py").write_text(WAITS)
        command = [sys.executable, "-c", START, "run", "--preload", "none", *words, "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment({"PYTHONPATH": str(tmp_path)}), **pipes)
        assert process.stdout.readline() == "up\n"
        shutil.rmtree(tmp_path / "ddplaunch")
        return process

    return start


@pytest.mark.ci
def test_a_request_to_a_job_whose_package_was_removed_does_not_end_it(job, run_in_fork, tmp_path):
    process = job("--run-id", "removed")
    for _ in range(2):
        assert run_in_fork("stacks", "removed").returncode == 69
    (tmp_path / "ends").touch()
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=scaled_timeout(30))
    assert (process.returncode, output.count("the control socket is left out, the job continues")) == (0, 1), output


@pytest.mark.ci
def test_a_restart_of_a_job_whose_package_was_removed_says_so(job, tmp_path):
    process = job("--max-restarts", "1", "--min-uptime", "0")
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=scaled_timeout(30))
    assert process.returncode == 2, output
    assert "Error: ddplaunch was installed anew or removed while this job ran: " in output
    assert "Traceback" not in output
