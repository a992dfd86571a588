"""Jobs of people who have submitit, on a real Slurm and on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, clean_environment, write
from tests.slurm.test_preemption import OPTIONS, TEMPLATE, assert_as_undisturbed, undisturbed  # noqa: F401
from tests.slurm.test_run import SHOWS, lines

DRIVER = """
    import sys
    import submitit
    from ddplaunch.schedulers.submitit import Task

    cluster, nodes, target, *args = sys.argv[1:]
    executor = submitit.AutoExecutor(folder="runs", cluster=cluster)
    executor.update_parameters(nodes=int(nodes), tasks_per_node=1, timeout_min=5)
    if cluster == "slurm":
        executor.update_parameters(slurm_signal_delay_s=90, slurm_exclusive=True)
    job = executor.submit(Task(target, nproc=2 if nodes == "1" else 1, args=args))
    print("job", job.job_id, flush=True)
    print("results", job.results(), flush=True)
"""


def outputs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "runs").glob("*.out")))


def errors(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "runs").glob("*.err")))


@pytest.fixture
def drive(slurm, tmp_path):
    """A cluster of two nodes, and what starts a program with submitit on its login host."""
    cluster = slurm(2)
    write(tmp_path, "driver.py", DRIVER)

    def start(*words: str | Path) -> subprocess.Popen[str]:
        return cluster.login.start(
            [sys.executable, "driver.py", "slurm", *map(str, words)],
            cwd=tmp_path,
            env={**clean_environment(), **cluster.environment, "PYTHONPATH": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return cluster, start


@pytest.mark.slow
def test_a_task_a_node(drive, tmp_path):
    _, start = drive
    write(tmp_path, "train.py", SHOWS)
    out, err = start("2", "train.py").communicate(timeout=100)
    assert "results [None, None]" in out, err + errors(tmp_path)
    assert lines(outputs(tmp_path)) == ["sum 2 0 0 2 1 0 2", "sum 2 1 0 2 1 1 2"]


@pytest.mark.slow
def test_a_failure_is_submitits(drive, tmp_path):
    _, start = drive
    driver = start("2", PROGRAMS / "fails.py", "exit", "1")
    _, err = driver.communicate(timeout=100)
    assert driver.returncode == 1
    assert "ended with exit code 7" in err
    assert "rank 1 exited with code 7" in errors(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_preempted_task_is_requeued_and_goes_on(drive, undisturbed, tmp_path):  # noqa: F811
    cluster, start = drive
    write(tmp_path, "gated.py", (PROGRAMS / "gated.py").read_text())
    driver = start("2", TEMPLATE, *OPTIONS)
    assert driver.stdout is not None
    job = int(driver.stdout.readline().split()[1])
    cluster.wait_until(lambda: outputs(tmp_path).count("waits") == 2, "the gate", timeout=100)
    high = cluster.sbatch("-p", "high", "-N2", "--exclusive", script="hostname")
    out, err = driver.communicate(timeout=200)
    assert "results [None, None]" in out, err + errors(tmp_path)
    assert (cluster.wait(high), cluster.restarts(job)) == ("COMPLETED", 1)
    assert re.search(r"made room at epoch 1 step [1-9]", outputs(tmp_path))
    assert_as_undisturbed(undisturbed, tmp_path, outputs(tmp_path))


def test_on_this_machine(tmp_path):
    write(tmp_path, "driver.py", DRIVER)
    write(tmp_path, "train.py", "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    done = subprocess.run(
        [sys.executable, "driver.py", "local", "1", "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "results [None]" in done.stdout, done.stderr + errors(tmp_path)
    assert sorted(re.findall(r"rank . of .*", outputs(tmp_path))) == ["rank 0 of 2", "rank 1 of 2"]
