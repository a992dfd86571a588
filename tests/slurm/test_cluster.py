"""Tests of the tests' own Slurm cluster, and of Slurm's behaviour where its manual leaves it open.

What takes Slurm long, as a preemption or a lost node, ``test_submit`` and ``test_preemption`` look at beside our jobs.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import is_alive, wait_until
from tests.slurm.capture import GPUS, NODES, SAMPLES, capture
from tests.slurm.cluster import COMMANDS, Slurm, unsupported
from tests.slurm.configuration import FOLDER

pytestmark = pytest.mark.ci

Make = Callable[..., Slurm]

BATCH_SIGNALS = """
    trap 'echo batch USR2 after $SECONDS s' USR2
    trap "echo batch TERM; exit" TERM
    echo started $SLURM_RESTART_COUNT
    while :; do sleep 0.1; done
"""
"""A batch script that says which signals it got, and goes on or ends."""

STEP_SIGNALS = """
    srun bash -c '
        trap "echo step USR2" USR2
        trap "echo step TERM; exit" TERM
        echo started $SLURM_RESTART_COUNT
        while :; do sleep 0.1; done
    '
"""
"""The same by the tasks of a step."""


def test_a_batch_job_and_its_exit_code(standing_slurm: Slurm, tmp_path: Path) -> None:
    cluster = standing_slurm
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\necho $GREETING from $(hostname) in $PWD\nexit 3\n")
    job = cluster.sbatch("--job-name", "greet", "-w", "n1", script=script, GREETING="hello")
    killed = cluster.sbatch(script="kill -9 $$")
    assert cluster.wait(job) == "FAILED"
    assert (cluster.exit_code(job), cluster.output(job)) == ((3, 0), f"hello from n1 in {tmp_path}\n")
    assert (cluster.wait(killed), cluster.exit_code(killed)) == ("FAILED", (0, 9))


def test_what_is_missing_is_named(slurm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := unsupported():
        pytest.skip(f"NO SLURM HERE: {reason}")
    monkeypatch.setitem(COMMANDS, "no-such-daemon", "its-package")
    assert unsupported() == "not installed: no-such-daemon (packages its-package)"
    with pytest.raises(pytest.skip.Exception, match="NO SLURM HERE: not installed: no-such-daemon"):
        slurm(1)


def test_the_samples_are_what_jobs_get(slurm: Make) -> None:
    assert capture(slurm(NODES, gpus=GPUS)) == {file.name: file.read_text() for file in SAMPLES.glob("*.txt")}


def test_nothing_is_left_after_close(slurm: Make) -> None:
    """Though what left its session and parent outlives its job. Another cluster has nothing to do with it."""
    there = slurm(1)
    stays = there.sbatch(script="sleep 1000")
    here = slurm(2, gpus=1)
    job = here.sbatch("-N2", script="sleep 1001 & (setsid sleep 1002 >/dev/null 2>&1 &); srun sleep 1003")
    wait_until(lambda: all(node.find("sleep 1003$") for node in here.nodes), "the step")
    assert here.run("squeue", "-h", "-o", "%i") == f"{job}\n"
    here.cancel(job)
    wait_until(lambda: not here.nodes[0].find("^sleep 1001"), "the end of the child")
    assert here.nodes[0].find("^sleep 1002"), "so what is gone after a job in these tests, ended by itself"
    pids = [pid for host in here.network.hosts for pid in host.processes()]
    assert len(pids) >= 3 + 3 + 2
    here.close()
    assert [pid for pid in pids if is_alive(pid)] == []
    assert not Path(FOLDER).exists()
    assert there.wait(stays, "RUNNING") == "RUNNING"


def test_nothing_is_left_when_the_test_process_is_killed(tmp_path: Path) -> None:
    if reason := unsupported():
        pytest.skip(f"NO SLURM HERE: {reason}")
    program = """if True:
        import os, pathlib, signal, sys
        from tests.virtual_hosts.network import Network
        from tests.slurm.cluster import COMMANDS, Slurm, unsupported
        network = Network(2)
        cluster = Slurm(network, pathlib.Path(sys.argv[1]))
        cluster.wait(cluster.sbatch(script="setsid sleep 1000"), "RUNNING")
        print(*(pid for host in network.hosts for pid in host.processes()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=root, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(word) for word in killed.stdout.split()]
    assert len(pids) >= 5
    wait_until(lambda: not any(map(is_alive, pids)), "the end of the hosts", timeout=10)
