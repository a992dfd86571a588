"""Tests of jobs on a real Slurm that are preempted and requeued."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import PROGRAMS, write_program
from tests.slurm.test_submit import number_of, submit  # noqa: F401 - a fixture
from tests.tools.virtual_hosts.host import finish

pytestmark = pytest.mark.ci

TEMPLATE = Path(ddplaunch.__file__).parents[1] / "docs" / "examples" / "template.py"
OPTIONS = ("--model", "mlp", "--data", "gated:data", "--epochs", "3", "--batch-size", "4")


@pytest.mark.timeout(300)
def test_preempted_jobs_resume_from_their_checkpoint(submit, tmp_path):  # noqa: F811
    """One whose time is up, and one that is preempted.

    Slurm looks at its jobs every 30 s: the signal comes up to 30 s early (60, says the manual). The end of the job is
    moved near, as nothing waits for minutes here.
    """
    cluster, start = submit(4)
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=100")  # both end by themselves
    folders = {name: tmp_path / name for name in ("late", "preempted")}
    for folder in folders.values():
        write_program(folder, "gated.py", (PROGRAMS / "gated.py").read_text())
    words = ("--nodes", "2", "--exclusive", "--requeue", "2", "--follow", "--setup", "export PYTHONPATH=.")
    template = (TEMPLATE, "--", *OPTIONS)
    following = {
        "late": start(*words, "--time", "5m", *template, cwd=folders["late"]),
        "preempted": start(*words, *template, cwd=folders["preempted"]),
    }
    late, preempted = map(number_of, following.values())
    for job in (late, preempted):
        cluster.wait_for(job, "waits", 2)
    nodes = cluster.show(preempted)["NodeList"]
    high = cluster.sbatch("-p", "high", "-w", nodes, "--exclusive", script="hostname")
    cluster.run("scontrol", "update", f"JobId={late}", "EndTime=now+125")  # 5 s more than the warning needs
    assert cluster.wait(high) == "COMPLETED"
    for job, process in zip((late, preempted), following.values(), strict=True):
        out, _ = finish(process)
        assert cluster.restarts(job) == 1
        assert re.search(r"preempted by SIGUSR2 on node [01] \(n\d\): ranks have", out)
        assert re.search(r"made room at epoch 1 step [1-9]", out)
        assert "ddplaunch: requeueing, 1 of 2" in out
        assert "finished: " in out
    assert not list(tmp_path.glob("*/.ddplaunch-exit-*"))


def test_where_slurm_ends_a_preempted_job_by_sigterm(submit, tmp_path):  # noqa: F811
    """Without preempt_send_user_signal no rank is warned, but the job comes back, and a failure then is one."""
    cluster, start = submit(settings={"SlurmctldParameters": "enable_configless"})
    write_program(
        tmp_path,
        "train.py",
        """
        import os, time

        print("run", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
        if "SLURM_RESTART_COUNT" in os.environ:
            raise SystemExit(3)
        time.sleep(1000)
        """,
    )
    following = start("--nodes", "2", "--exclusive", "--requeue", "2", "--follow", "train.py")
    job = number_of(following)
    cluster.wait_for(job, "run 0", 2)
    high = cluster.sbatch("-p", "high", "-N2", "--exclusive", script="hostname")
    out, _ = finish(following, 3)
    assert (cluster.wait(high), cluster.restarts(job)) == ("COMPLETED", 1)
    assert "ddplaunch: requeueing, 1 of 2" in out
    assert "run 1" in out


def test_a_job_that_is_cancelled_after_the_warning_stays_away(submit):  # noqa: F811
    cluster, start = submit()
    following = start("--nodes", "2", "--requeue", "3", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    cluster.cancel(job, "--signal=USR2")
    cluster.wait_for(job, "to save a checkpoint")
    cluster.cancel(job)
    finish(following, 143)
    assert (cluster.wait(job), cluster.restarts(job)) == ("CANCELLED", 0)
