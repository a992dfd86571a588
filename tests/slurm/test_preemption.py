"""``ddplaunch submit --requeue`` on a real Slurm: warned, requeued, and in the end as if nothing had happened."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

import ddplaunch
from tests.conftest import PROGRAMS, clean_environment, command, write
from tests.slurm.test_submit import number_of, submit  # noqa: F401 - a fixture

TEMPLATE = Path(ddplaunch.__file__).parents[1] / "docs" / "examples" / "template.py"
OPTIONS = ("--model", "mlp", "--data", "gated:data", "--epochs", "3", "--batch-size", "4")


@pytest.fixture
def undisturbed(tmp_path):
    """The model and the last words of a run that nobody disturbs."""
    folder = tmp_path / "undisturbed"
    write(folder, "passed", "")
    write(folder, "gated.py", (PROGRAMS / "gated.py").read_text())
    done = subprocess.run(
        command("run", "--nproc", "2", TEMPLATE, "--", *OPTIONS),
        cwd=folder,
        env=clean_environment({"PYTHONPATH": str(folder)}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return _model(folder), _last(done.stdout)


def _model(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def _last(output: str) -> list[str]:
    return re.findall(r"epoch 3: .*|finished: .*", output)


def assert_as_undisturbed(undisturbed, folder: Path, output: str) -> None:
    model, last = undisturbed
    resumed = _model(folder)
    assert _last(output) == last
    assert all(torch.equal(resumed[name], model[name]) for name in model)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_preempted_job_goes_on_where_it_was(submit, undisturbed, tmp_path):  # noqa: F811
    cluster, start = submit
    write(tmp_path, "gated.py", (PROGRAMS / "gated.py").read_text())
    words = ("--nodes", "2", "--sbatch-arg=--exclusive", "--requeue", "2", "--follow", "--setup", "export PYTHONPATH=.")
    following = start(*words, TEMPLATE, "--", *OPTIONS)
    job = number_of(following)
    cluster.wait_for(job, "waits", 2)
    high = cluster.sbatch("-p", "high", "-N2", "--exclusive", script="hostname")
    out, err = following.communicate(timeout=200)
    assert following.returncode == 0, out + err
    assert cluster.wait(high) == "COMPLETED"
    assert cluster.restarts(job) == 1  # by our script, or by Slurm, where its 3 s are over before
    assert re.search(r"SIGUSR2 on node [01] \(n[12]\): the job must make room", out)
    assert re.search(r"made room at epoch 1 step [1-9]", out)
    assert_as_undisturbed(undisturbed, tmp_path, out)
    assert not list(tmp_path.glob(".ddplaunch-requeue-*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_whose_time_is_up_goes_on_where_it_was(submit, undisturbed, tmp_path):  # noqa: F811
    cluster, start = submit
    write(tmp_path, "gated.py", (PROGRAMS / "gated.py").read_text())
    words = ("--nodes", "2", "--time", "5", "--requeue", "2", "--follow", "--setup", "export PYTHONPATH=.")
    following = start(*words, TEMPLATE, "--", *OPTIONS)
    job = number_of(following)
    cluster.wait_for(job, "waits", 2)
    cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now+125")  # 5 s more than the warning needs
    out, err = following.communicate(timeout=200)
    assert following.returncode == 0, out + err
    assert cluster.restarts(job) == 1
    assert "ddplaunch: requeueing, 1 of 2" in out
    assert_as_undisturbed(undisturbed, tmp_path, out)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("submit", [{"SlurmctldParameters": "enable_configless"}], indirect=True)
def test_where_slurm_ends_a_preempted_job_by_sigterm(submit, tmp_path):  # noqa: F811
    """Without preempt_send_user_signal nobody is warned, but the job comes back, and a failure then is one."""
    cluster, start = submit
    write(
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
    following = start("--nodes", "2", "--sbatch-arg=--exclusive", "--requeue", "2", "--follow", "train.py")
    job = number_of(following)
    cluster.wait_for(job, "run 0", 2)
    high = cluster.sbatch("-p", "high", "-N2", "--exclusive", script="hostname")
    out, err = following.communicate(timeout=200)
    assert following.returncode == 3, out + err
    assert (cluster.wait(high), cluster.restarts(job)) == ("COMPLETED", 1)
    assert "ddplaunch: requeueing, 1 of 2" in out
    assert "run 1" in out


@pytest.mark.slow
def test_a_job_is_not_requeued_more_often_than_wanted(submit, tmp_path):  # noqa: F811
    cluster, start = submit
    write(
        tmp_path,
        "asks.py",
        """
        import os, time
        from ddplaunch import runtime

        print("run", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
        while not runtime.preempted():
            time.sleep(0.01)
        """,
    )
    following = start("--nodes", "2", "--requeue", "1", "--follow", "asks.py", "--nproc", "2")
    job = number_of(following)
    for count in range(2):
        cluster.wait_for(job, f"run {count}", 4)
        cluster.cancel(job, "--signal=USR2")
    out, err = following.communicate(timeout=100)
    assert following.returncode == 75, out + err
    assert "ddplaunch: requeueing, 1 of 1" in out
    assert "ddplaunch: not requeued again: --requeue 1" in out
    assert not list(tmp_path.glob(".ddplaunch-requeue-*"))


@pytest.mark.slow
def test_a_job_that_is_cancelled_after_the_warning_stays_away(submit):  # noqa: F811
    cluster, start = submit
    following = start("--nodes", "2", "--requeue", "3", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    cluster.cancel(job, "--signal=USR2")
    cluster.wait_for(job, "must make room")
    cluster.cancel(job)
    following.communicate(timeout=100)
    assert following.returncode == 143
    assert (cluster.wait(job), cluster.restarts(job)) == ("CANCELLED", 0)
