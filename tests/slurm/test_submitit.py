"""Tests of submitit jobs on a real Slurm and on this machine; ``test_requeue`` has one more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, clean_environment, run_command, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.slurm.test_run import SHOWS, lines
from tests.tools.slurm.cluster import Slurm
from tests.tools.virtual_hosts.host import finish

DRIVER = """
    import sys
    import submitit
    from ddplaunch.submitit import Task

    cluster, nodes, target, *args = sys.argv[1:]
    executor = submitit.AutoExecutor(folder="runs", cluster=cluster)
    nodes, _, tasks = nodes.partition("x")
    executor.update_parameters(nodes=int(nodes), tasks_per_node=int(tasks or 1), timeout_min=5)
    if cluster == "slurm":
        executor.update_parameters(slurm_signal_delay_s=90, slurm_exclusive=True)
    job = executor.submit(Task(target, nproc=2 if nodes == "1" and not tasks else None, args=args))
    print("job", job.job_id, flush=True)
    print("results", job.results(), flush=True)
"""


def outputs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "runs").glob("*.out")))


def errors(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "runs").glob("*.err")))


def drive(cluster: Slurm, folder: Path, *words: str | Path) -> subprocess.Popen[str]:
    """Start the driver on the login host."""
    write_program(folder, "driver.py", DRIVER)
    environment = {**clean_environment(), **cluster.environment, "PYTHONPATH": str(folder)}
    return cluster.login.type([sys.executable, "driver.py", "slurm", *words], folder, environment)


@pytest.mark.ci
def test_a_task_a_node_and_a_task_a_rank(standing_slurm, tmp_path):
    drivers = {}
    for nodes in ("2", "2x2"):
        folder = write_program(tmp_path / nodes, "train.py", SHOWS).parent
        drivers[nodes] = folder, drive(standing_slurm, folder, nodes, "train.py")
    shown = {}
    for nodes, (folder, driver) in drivers.items():
        out, err = driver.communicate(timeout=scaled_timeout(100))
        assert f"results [{', '.join(['None'] * (2 if nodes == '2' else 4))}]" in out, err + errors(folder)
        shown[nodes] = lines(outputs(folder))
    assert shown["2"] == ["sum 2 0 0 2 1 0 2", "sum 2 1 0 2 1 1 2"]
    assert shown["2x2"] == ["sum 4 0 0 4 2 0 2", "sum 4 1 1 4 2 0 2", "sum 4 2 0 4 2 1 2", "sum 4 3 1 4 2 1 2"]


@pytest.mark.ci
def test_a_failure_is_submitits(standing_slurm, tmp_path):
    driver = drive(standing_slurm, tmp_path, "2", PROGRAMS / "fails.py", "exit", "1")
    _, err = finish(driver, 1)
    assert "ended with exit code 7" in err
    assert "rank 1 exited with code 7" in errors(tmp_path)


@pytest.mark.ci
def test_on_this_machine(tmp_path):
    write_program(tmp_path, "driver.py", DRIVER)
    write_program(
        tmp_path, "train.py", "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    done = run_command([sys.executable, "driver.py", "local", "1", "train.py"], tmp_path, timeout=100)
    assert "results [None]" in done.stdout, done.stderr + errors(tmp_path)
    assert sorted(re.findall(r"rank . of .*", outputs(tmp_path))) == ["rank 0 of 2", "rank 1 of 2"]


WARNS = """
    import pathlib, signal, time
    import psutil
    import submitit
    from ddplaunch.submitit import Task

    executor = submitit.AutoExecutor(folder="runs", cluster="local")
    executor.update_parameters(tasks_per_node=1, timeout_min=5)
    job = executor.submit(Task("waits.py", options=["--start", "exec"]))
    while not pathlib.Path("runs.txt").exists():
        time.sleep(0.05)
    (task,) = psutil.Process(job._process.pid).children()
    task.send_signal(signal.SIGUSR2)  # as the scheduler warns, and submitit's controller does when the time is over
    while "to save a checkpoint" not in (job.stderr() or "") and job.state == "RUNNING":
        time.sleep(0.05)
    pathlib.Path("gate").touch()
    print("results", job.results(), flush=True)
"""


@pytest.mark.ci
def test_a_run_that_finishes_after_the_warning_is_not_requeued(tmp_path):
    write_program(tmp_path, "driver.py", WARNS)
    wait = "while not os.path.exists('gate'):\n    time.sleep(0.05)\n"
    write_program(tmp_path, "waits.py", f"import os, time\nopen('runs.txt', 'a').write('run ')\n{wait}")
    done = run_command([sys.executable, "driver.py"], tmp_path, timeout=100)
    assert "results [None]" in done.stdout, done.stderr + errors(tmp_path)
    assert (tmp_path / "runs.txt").read_text() == "run "
    assert "Requeued" not in errors(tmp_path)
