"""Tests that the first feature of CONTRIBUTING.md works as it stands there: a folder and a line, in a copy."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import ddplaunch
from tests.conftest import clean_environment
from tests.package_copy import add_feature, copy_package

CONTRIBUTING = Path(ddplaunch.__file__).parents[1] / "CONTRIBUTING.md"


RUN = ("run", "--count", "--run-id", "toy", "--nproc", "3", "--no-python", "sh", "-c", "echo up; exec sleep 600")


def read_files() -> dict[str, str]:
    """Return the files of the feature in CONTRIBUTING.md, "Your first feature", by name without ".py"."""
    return dict(
        re.findall(r"```python\n# features/count/(\w+)\.py: [^\n]*\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    )


def test_a_feature_is_a_folder_and_a_line(tmp_path: Path):
    add_feature(copy_package(tmp_path), "count", **read_files())

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
        assert helped.stdout
        output = helped.stdout.read().partition("\nOutput:\n")[2].partition("\n\n")[0]
        assert re.search(r"--count +Count the ranks that start.$", output), output

    with start(*RUN) as job:
        assert job.stdout
        assert [job.stdout.readline()[-3:] for _ in range(3)] == ["up\n"] * 3
        try:
            with start("count", "toy") as asking:
                assert asking.stdout
                assert asking.stdout.read() == "3\n"
        finally:
            job.send_signal(signal.SIGTERM)
        assert "ddplaunch: 3 ranks have started\n" in job.communicate()[1]
