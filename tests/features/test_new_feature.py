"""Tests that the first feature of CONTRIBUTING.md works as it stands there: a folder and a line, in a copy."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import clean_environment, write_program
from tests.package_copy import add_feature, copy_package
from tests.start_modes import FORKED

CONTRIBUTING = Path(ddplaunch.__file__).parents[1] / "CONTRIBUTING.md"
MAX_LINES = 60  # of the files of the walk-through, without blank ones


def read_files() -> dict[str, str]:
    """Return the files of the feature in CONTRIBUTING.md, "Your first feature", by name without ".py"."""
    return dict(
        re.findall(r"```python\n# features/count/([\w/]+)\.py: [^\n]*\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    )


@pytest.mark.ci
def test_a_feature_is_a_folder_and_a_line(tmp_path: Path):
    files = read_files()
    assert {*files} == {"feature", "node", "rank/greeting", "request", "command"}
    assert sum(bool(line) for text in files.values() for line in text.splitlines()) <= MAX_LINES
    add_feature(copy_package(tmp_path), "count", **files)
    write_program(tmp_path, "train.py", "import time\ntime.sleep(600)\n")

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ddplaunch", *words],
            env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with start("run", "--help-all") as helped:
        output = helped.stdout.read().partition("\nOutput:\n")[2].partition("\n\n")[0]
        assert re.search(r"--count +Count the ranks that start.$", output), output

    with start("run", "--count", "--run-id", "toy", "--nproc", "3", *FORKED, "train.py") as job:
        lines = [job.stdout.readline() for _ in range(3)]
        assert sorted(lines) == [f"[{rank}] hello from rank {rank}\n" for rank in range(3)]
        try:
            with start("count", "toy") as asking:
                assert asking.stdout.read() == "3\n"
        finally:
            job.send_signal(signal.SIGTERM)
        assert "ddplaunch: 3 ranks have started\n" in job.communicate()[1]
