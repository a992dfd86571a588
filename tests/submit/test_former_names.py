"""Public names that have moved: programs import them, and jobs that wait in a queue were pickled with them."""

from __future__ import annotations

import subprocess
import sys

FORMER = "from ddplaunch.schedulers.submitit import Task"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_the_former_name_says_the_new_one():
    said = run(f"{FORMER}\nprint(Task.__module__)")
    assert said.stdout == "ddplaunch.submit.submitit\n"
    assert "DeprecationWarning" in said.stderr
    assert "from ddplaunch.submit.submitit import Task" in said.stderr


def test_a_job_pickled_under_the_former_name_is_read():
    pickled = b"cddplaunch.schedulers.submitit\nTask\n."
    said = run(f"import pickle; print(pickle.loads({pickled!r}).__qualname__)")
    assert said.stdout == "Task\n"
