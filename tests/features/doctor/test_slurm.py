"""Tests of ``ddplaunch doctor`` in a Slurm job, where it finds the job's nodes itself."""

import json
import sys

import pytest

pytestmark = [pytest.mark.ci, pytest.mark.slow]


def test_the_nodes_of_the_job(slurm, tmp_path):
    cluster = slurm(2)
    words = f"{sys.executable} -m ddplaunch doctor"
    job = cluster.sbatch("-N2", "-n2", script=f"{words} --json > found.json\nsrun -n1 {words} 2> refused\n")
    cluster.wait(job, timeout=100)
    assert (tmp_path / "found.json").read_text(), cluster.output(job)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["nodes"]) == 2
    assert not [each for each in found["nodes"] if each["trouble"]], found["nodes"]
    assert {(each["source"], each["target"], each["outcome"]) for each in found["ways"]} == {(0, 1, "ok"), (1, 0, "ok")}
    assert [0, 1] in [each["nodes"] for each in found["speeds"]]
    assert "but it already runs in a step (srun)" in (tmp_path / "refused").read_text()


def test_a_command_on_halves_of_the_nodes(slurm):
    """``bisect`` names the second of the job's nodes, on which the command fails."""
    cluster = slurm(2)
    step = "srun --nodelist={hosts} --nodes={nnodes} --ntasks={nnodes} --overlap"
    check = "test $(scontrol show hostnames $SLURM_JOB_NODELIST | tail -1) != $SLURMD_NODENAME || exit 7"
    words = f"{sys.executable} -m ddplaunch doctor bisect -- {step} sh -c '{check}'"
    job = cluster.sbatch("-N2", "-n2", script=f"{words}\nscontrol show hostnames | tail -1 | sed s/^/BAD=/\n")
    cluster.wait(job, timeout=60)
    output = cluster.output(job)
    bad = output.partition("BAD=")[2].strip()
    assert f"--exclude={bad}\n" in output
    assert output.count("exited with code 7") == 4
    assert "ddplaunch: the last host passes alone\n" in output
