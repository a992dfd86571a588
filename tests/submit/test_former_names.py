"""Public names that have moved: programs import them, and jobs that wait in a queue were pickled with them."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import clean_environment, write

FORMER = "from ddplaunch.schedulers.submitit import Task"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_the_former_name_says_the_new_one():
    said = run(f"{FORMER}\nprint(Task.__module__)")
    assert said.stdout == "ddplaunch.submit.submitit\n"
    assert "DeprecationWarning" in said.stderr
    assert "from ddplaunch.submit.submitit import Task" in said.stderr


PICKLED = (
    b"\x80\x04\x95\x84\x00\x00\x00\x00\x00\x00\x00\x8c\x1dddplaunch.schedulers.submitit\x94\x8c\x04Task\x94\x93\x94)"
    b"\x81\x94}\x94(\x8c\x06target\x94\x8c\x08train.py\x94\x8c\x05nproc\x94K\x02\x8c\x04args\x94]\x94(\x8c\x04--lr"
    b"\x94\x8c\x030.1\x94e\x8c\x07options\x94)\x8c\x05grace\x94G@>\x00\x00\x00\x00\x00\x00ub."
)
"""``Task("train.py", nproc=2, args=["--lr", "0.1"], grace=30.0)``, as the version before has pickled it."""


def test_a_job_pickled_by_the_version_before_is_read():
    said = run(f"import pickle; print(pickle.loads({PICKLED!r}))")
    assert said.stdout == "Task(target='train.py', nproc=2, args=['--lr', '0.1'], options=(), grace=30.0)\n"


BEFORE = (
    "import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd()); "
    "from ddplaunch.cli import main; main()"
)
"""What batch scripts and manifests of the version before have Python run; they may wait in a queue."""


def test_a_batch_script_of_the_version_before_runs(tmp_path):
    write(tmp_path, "train.py", "import os; print('trained', os.environ['RANK'])")
    words = [sys.executable, "-c", BEFORE, "run", "--cluster", "none", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "trained 0\n"
