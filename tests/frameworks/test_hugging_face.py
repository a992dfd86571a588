"""Tests of accelerate and transformers' Trainer: world size, gradients, samples and resuming."""

import pytest

from tests.conftest import write_program
from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, reports, requires

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(3 * TIMEOUT_S)]

ACCELERATED = PROGRAMS / "accelerated.py"
ON_CPUS = {"ACCELERATE_USE_CPU": "true"}
"""What ``accelerate launch --cpu`` sets; a script can say ``Accelerator(cpu=True)``."""


@requires("accelerate")
def test_accelerate_gives_the_results_of_torchrun_and_of_plain_python(launchers, tmp_path):
    """Its own configuration does not count: that is accelerate launch's."""
    write_program(
        tmp_path,
        "hf/accelerate/default_config.yaml",
        "distributed_type: MULTI_CPU\nnum_processes: 5\nuse_cpu: true\nmixed_precision: 'no'\n",
    )
    ours = reports(launchers.ddplaunch("--preload", "torch,accelerate", f"{ACCELERATED}:main", env=ON_CPUS))
    assert ours == reports(launchers.torchrun(ACCELERATED, env=ON_CPUS))
    assert [(report["rank"], report["world_size"], report["kind"]) for report in ours] == [
        (0, 2, "MULTI_CPU"),
        (1, 2, "MULTI_CPU"),
    ]
    alone = reports(launchers.python(ACCELERATED))[0]
    for report in ours:
        assert report["gathered"] == list(range(11))  # 11 samples over 2 ranks: the one added to even it out is gone
        assert (report["updates"], report["weight"]) == (alone["updates"], alone["weight"])
    assert alone["updates"] == 3  # 6 batches, gradients accumulated over 2


@requires("accelerate")
def test_without_a_gpu_accelerate_needs_the_cpu_flag(launchers, tmp_path):
    """Without ACCELERATE_USE_CPU each rank is a world of its own, whatever accelerate's configuration says."""
    write_program(tmp_path, "hf/accelerate/default_config.yaml", "distributed_type: MULTI_CPU\nuse_cpu: true\n")
    ours = reports(launchers.ddplaunch(ACCELERATED))
    assert [(report["rank"], report["world_size"]) for report in ours] == [(0, 1), (0, 1)]
    assert ours == reports(launchers.torchrun(ACCELERATED))


@requires("transformers", "accelerate")
def test_the_trainer_restarted_from_its_checkpoint_ends_as_under_torchrun_undisturbed(launchers, tmp_path):
    program = PROGRAMS / "transformers_trainer.py"
    fails_at = "3"
    done = launchers.ddplaunch(
        "--max-restarts", "1", "--preload", "torch,transformers.trainer", program, "--", tmp_path / "ours", fails_at
    )
    assert "rank 1 failed with RuntimeError: step 3 failed" in done.stderr
    ours, theirs = reports(done), reports(launchers.torchrun(program, tmp_path / "theirs"))
    assert [report.pop("resumed") for report in ours] == ["checkpoint-2"] * 2
    assert [report.pop("resumed") for report in theirs] == [None] * 2
    assert ours == theirs
    assert [(report["rank"], report["world_size"], report["steps"]) for report in ours] == [(0, 2, 6), (1, 2, 6)]
    assert {report["mode"] for report in ours} == {"distributed"}
