"""The scale benchmark itself: it runs, finds nothing wrong, and draws; nothing is asserted about seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.benchmarks import loglog
from tests.conftest import clean_environment


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ss") is None, reason="counting messages needs ss (iproute2)")
def test_few_nodes(tmp_path):
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.svg"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.benchmarks.scale", "--nodes", "4", "--played", "16", "--rest", "1"),
            *("--json", numbers, "--plot", plot),
        ],
        cwd=Path(__file__).parents[1],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    measured = json.loads(numbers.read_text())
    assert list(measured["real"]) == ["4"]
    assert list(measured["played"]) == ["16"]
    assert measured["played"]["16"]["connections that node 0 dropped"] == 0
    assert "| nodes | 4 | grows as |" in run.stdout
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_power_that_fits():
    assert loglog.exponent([(n, 5 * n**2) for n in (4, 16, 64)]) == pytest.approx(2)
    assert loglog.exponent([(4, 0.0), (16, 1.0)]) is None
