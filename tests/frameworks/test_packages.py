"""Tests that packages imported before the fork look the same in a rank as those imported by the rank."""

import json
from pathlib import Path

import pytest

from tests.conftest import read_events
from tests.frameworks.launchers import requires

pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(0)]

PACKAGES = ("accelerate", "hydra", "lightning", "scipy", "sklearn", "torchmetrics", "transformers")
PROGRAM = Path(__file__).parent / "programs" / "packages.py"
RANKS = (0, 1)

BY_ADDRESS = {"scipy.sparse._data.name"}
"""Left by a loop over a set of functions, whose order is that of their addresses."""


@requires(*PACKAGES)
def test_ranks_see_the_same(run_ddplaunch, tmp_path):
    def run(name, *options):
        words = ("run", "--nproc", str(len(RANKS)), *options, PROGRAM, tmp_path / name)
        done = run_ddplaunch(*words, env={"PYTHONHASHSEED": "0"}, timeout=300)
        assert done.returncode == 0, done.stderr
        return [json.loads((tmp_path / f"{name}{rank}").read_text()) for rank in RANKS]

    alone = run("alone", "--start", "exec")
    forked = run("forked", "--log-dir", tmp_path / "log")
    (ready,) = read_events(tmp_path / "log", "zygote_ready")
    excluded = dict(ready["excluded"])
    assert {"accelerate", "hydra", "lightning", "scipy"}.isdisjoint(excluded), excluded
    assert {"accelerate", "lightning"} <= set(ready["modules"])  # these import most of the others
    alike = {name for name, value in alone[0]["constants"].items() if alone[1]["constants"].get(name) == value}
    alike -= BY_ADDRESS
    for rank in RANKS:
        assert forked[rank].keys() == alone[rank].keys()
        for field in alone[rank].keys() - {"constants"}:
            assert forked[rank][field] == alone[rank][field], field
        ours, theirs = (each[rank]["constants"] for each in (forked, alone))
        assert theirs.keys() <= ours.keys()
        assert {name: (ours[name], theirs[name]) for name in alike if ours[name] != theirs[name]} == {}
