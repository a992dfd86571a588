"""Tests of restarts: forked from the same zygote, with a new store, counted and limited."""

from __future__ import annotations

import re
import signal

import pytest

from ddplaunch.core.job.job_attempt import JobAttempt
from ddplaunch.core.job.restart_policy import MAX_BACKOFF_S, MAX_SHORT_ATTEMPTS, RestartPolicy
from tests.conftest import PROGRAMS, wait_until
from tests.core.job_configs import make_job_config
from tests.start_modes import EXEC, FORKED, LIGHT, WARM

FAILS = PROGRAMS / "fails.py"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "mode"),
    [
        pytest.param("exception-once", FORKED, id="exception-zygote", marks=pytest.mark.smoke),
        pytest.param("peer-kill-once", ("--start", "zygote"), id="peer-kill-zygote", marks=pytest.mark.slow),
        pytest.param("peer-kill-once", EXEC, id="peer-kill-exec", marks=[pytest.mark.ci, pytest.mark.slow]),
    ],
)
def test_a_restart_succeeds(run_ddplaunch, tmp_path, mode, how):
    """Collectives work too: the new attempt has a fresh store on the same port (torchrun's reads the old keys)."""
    ranks = 2 if mode == EXEC else 3  # each imports torch in each attempt
    words = ("--nproc", str(ranks), "--max-restarts", "2", "--log-dir", "logs", FAILS, how, "1")
    done = run_ddplaunch("run", *mode, *words)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2" in done.stderr
    lines = re.findall(r"rank (\d) attempt (\d) parent (\d+)", done.stdout)
    assert sorted(int(rank) for rank, attempt, _ in lines if attempt == "1") == [*range(ranks)]
    assert len({parent for *_, parent in lines}) == 1  # the same zygote
    if how == "peer-kill-once":
        assert "ddplaunch: rank 1 was ended by SIGKILL" in done.stderr, "not the lost connections of the others"
        assert done.stdout.count("reduced") == 2 * ranks
    (folder,) = (tmp_path / "logs").iterdir()
    assert "attempt 0" in (folder / "rank-1.log").read_text()
    assert "attempt 1" in (folder / "rank-1.attempt-1.log").read_text()


def test_descendants_are_killed_before_a_restart(start_ddplaunch, tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    sys.exit(3)\n"
        "print('second', flush=True)\n"
        "time.sleep(1000)\n"
    )
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--max-restarts", "5", script)
    job.wait_for("second", 2)
    # launcher, zygote and two ranks; a guardian and, with torch, the store; what records the run ends by itself
    wait_until(lambda: len(job.left()) == 4 + 2 * WARM, "the end of all others")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.stderr().count("restart") == 1  # none after a signal


def test_backoff_doubles_only_while_ranks_die_early():
    restarts = RestartPolicy(make_job_config(max_restarts=100, restart_backoff=10.0, min_uptime=5.0))
    assert [after(restarts, 1.0), after(restarts, 1.0), after(restarts, 1.0)] == [10.0, 20.0, None]
    again = restarts.decide(JobAttempt(), 1.0).remark
    assert again == f"giving up: {MAX_SHORT_ATTEMPTS} attempts in a row lasted less than 5 s (--min-uptime)"
    patient = RestartPolicy(make_job_config(max_restarts=100, restart_backoff=40.0, min_uptime=5.0))
    assert [after(patient, 1.0), after(patient, 1.0), after(patient, 9.0)] == [40.0, MAX_BACKOFF_S, 40.0]


def after(restarts: RestartPolicy, uptime: float) -> float | None:
    """The wait after an attempt of which nothing else is known."""
    return restarts.decide(JobAttempt(), uptime).delay_s
