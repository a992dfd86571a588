"""Tests of Lightning's Trainer and Fabric, which use the launcher's ranks and start no processes."""

import pytest

from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, reports, requires

pytestmark = [requires("lightning"), pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(3 * TIMEOUT_S)]

TRAINER = PROGRAMS / "lightning_trainer.py"
PRELOAD = ("--preload", "torch,lightning")


def test_the_trainer_does_as_under_torchrun(launchers):
    ours = reports(launchers.ddplaunch(TRAINER))
    assert ours == reports(launchers.torchrun(TRAINER))
    assert [report["rank"] for report in ours] == [0, 1]  # two reports: no other process was started
    assert [report["rank before"] for report in ours] == [0, 1]
    for report in ours:
        assert report["world_size"] == 2
        assert report["environment"] == "TorchElasticEnvironment"
        assert report["children"] == []
    first, second = ours
    assert sorted(first["seen"] + second["seen"]) == sorted([*range(16), *range(16)])  # in each of two epochs
    assert first["weight"] == second["weight"]


def test_preloaded_lightning_learns_the_same(launchers):
    ours = reports(launchers.ddplaunch(*PRELOAD, f"{TRAINER}:main", "--devices", "2"))
    for when in ("rank before", "rank"):  # there is a trainer: it reads them at its import, which was before the fork
        assert [report[when] for report in ours] == [0, 1]
    assert sorted(ours[0]["seen"] + ours[1]["seen"]) == sorted([*range(16), *range(16)])
    assert ours[0]["weight"] == ours[1]["weight"]
    assert ours[0]["loss"] == ours[1]["loss"]


def test_a_wrong_number_of_devices_is_reported_once(launchers):
    done = launchers.ddplaunch(*PRELOAD, "--show", "none", TRAINER, "--", "3")
    assert done.returncode == 1
    headline = next(line for line in done.stderr.splitlines() if "failed with" in line)  # a slow import is noted before
    assert "failed with ValueError: You set `devices=3` and `num_nodes=1` in Lightning" in headline
    assert done.stderr.count("does not match the world size (2)") == 2  # the headline, and the traceback's last line


def test_fabric(launchers):
    ours = reports(launchers.ddplaunch(*PRELOAD, PROGRAMS / "lightning_fabric.py"))
    assert [(report["rank"], report["world_size"]) for report in ours] == [(0, 2), (1, 2)]
    assert [report["seen"] for report in ours] == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    assert len({*ours[0]["weights"], *ours[1]["weights"]}) == 1  # all ranks' weights, as each rank has gathered them
    assert ours[0]["loss"] == ours[1]["loss"]
