"""Tests of a script with ``@hydra.main``: its configuration, its overrides, and one run folder for all ranks."""

from pathlib import Path

import pytest

from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, reports, requires

pytestmark = [requires("hydra"), pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(3 * TIMEOUT_S)]

SCRIPT = PROGRAMS / "configured.py"
ONE_FOLDER = "hydra.run.dir=runs/${oc.env:TORCHELASTIC_RUN_ID}"


def run_folders(folder: Path) -> list[Path]:
    return [path.parent for path in folder.rglob(".hydra")]


def test_a_script_does_as_under_torchrun_in_a_folder_named_after_the_time(launchers, tmp_path):
    ours = reports(launchers.ddplaunch(SCRIPT))
    assert ours == [{"rank": 0, "lr": 0.1, "weight": 0.49}, {"rank": 1, "lr": 0.1, "weight": 0.49}]
    # Each rank makes the folder of the second in which it starts: one, or two where that second ends between them.
    folders = run_folders(tmp_path)
    assert {path.parent.parent.name for path in folders} == {"outputs"}
    assert sorted(file.name for path in folders for file in path.glob("rank*")) == ["rank0.txt", "rank1.txt"]
    assert ours == reports(launchers.torchrun(SCRIPT))


@pytest.mark.parametrize("target", [("--preload", "torch,hydra", f"{SCRIPT}:main"), ("-m", "configured")])
def test_the_run_id_makes_one_folder_for_all_ranks(target, launchers, tmp_path):
    ours = reports(launchers.ddplaunch(*target, "--", "lr=0.2", ONE_FOLDER, env={"PYTHONPATH": str(PROGRAMS)}))
    assert [(report["rank"], report["lr"]) for report in ours] == [(0, 0.2), (1, 0.2)]
    (folder,) = run_folders(tmp_path / "runs")
    assert sorted(path.name for path in folder.glob("rank*")) == ["rank0.txt", "rank1.txt"]
