"""Tests of jobs on a real Slurm that are preempted and requeued, with the same result as undisturbed ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import PROGRAMS, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.slurm.test_cluster import BATCH_SIGNALS
from tests.slurm.test_submit import number_of, submit  # noqa: F401 - a fixture
from tests.slurm.test_submitit import drive, errors, outputs

pytestmark = pytest.mark.ci

TEMPLATE = Path(ddplaunch.__file__).parents[1] / "docs" / "examples" / "template.py"
OPTIONS = ("--model", "mlp", "--data", "gated:data", "--epochs", "3", "--batch-size", "4")


def assert_as_undisturbed(undisturbed: tuple[Path, str], folder: Path, output: str) -> None:
    """The last words of a run and its model are those of another, whose folder and output come first."""
    import torch

    assert _last(output) == _last(undisturbed[1])
    resumed, model = (
        torch.load(each / "checkpoint.pt", weights_only=True)["model"] for each in (folder, undisturbed[0])
    )
    assert all(torch.equal(resumed[name], model[name]) for name in model)


def _last(output: str) -> list[str]:
    return re.findall(r"epoch 3: .*|finished: .*", output)


@pytest.mark.timeout(600)
def test_jobs_that_make_room_go_on_where_they_were(submit, run_ddplaunch, tmp_path):  # noqa: F811
    """One whose time is up, one that is preempted, and a task of submitit's that is, beside each other.

    Slurm looks at its jobs every 30 s: the signal comes up to 30 s early (60, says the manual), the end 30 s late. With
    --time=1 the signal "10 s before" comes at 30 s; the end at 90 s is not waited for here, but that of a job whose end
    is moved near.
    """
    cluster, start = submit(7)
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=100")  # all end by themselves
    early = cluster.sbatch("-w", "n1", "--time=1", "--signal=B:USR2@10", script=BATCH_SIGNALS)
    short = cluster.sbatch("-w", "n1", "--time=10", script=BATCH_SIGNALS)
    for job in (early, short):
        cluster.wait_for(job, "started")
    cluster.run("scontrol", "update", f"JobId={short}", "EndTime=now+5")

    folders = {name: tmp_path / name for name in ("late", "preempted", "submitit", "undisturbed")}
    for folder in folders.values():
        write_program(folder, "gated.py", (PROGRAMS / "gated.py").read_text())
    words = ("--nodes", "2", "--exclusive", "--requeue", "2", "--follow", "--setup", "export PYTHONPATH=.")
    template = (TEMPLATE, "--", *OPTIONS)
    following = {
        "late": start(*words, "--time", "5m", *template, cwd=folders["late"]),
        "preempted": start(*words, *template, cwd=folders["preempted"]),
    }
    late, preempted = map(number_of, following.values())
    driver = drive(cluster, folders["submitit"], "2", TEMPLATE, *OPTIONS)
    assert driver.stdout is not None
    task = int(driver.stdout.readline().split()[1])

    cluster.wait_until(lambda: outputs(folders["submitit"]).count("waits") == 2, "submitit's gate", timeout=100)
    cluster.wait_for(preempted, "waits", 2)
    nodes = ",".join(cluster.show(job)["NodeList"] for job in (preempted, task))
    high = cluster.sbatch("-p", "high", "-w", nodes, "--exclusive", script="hostname")
    cluster.wait_for(late, "waits", 2)
    cluster.run("scontrol", "update", f"JobId={late}", "EndTime=now+125")  # 5 s more than the warning needs

    # What these would have come to, found out while they wait.
    write_program(folders["undisturbed"], "passed", "")
    done = run_ddplaunch(
        *("run", "--nproc", "2", *template), cwd=folders["undisturbed"], env={"PYTHONPATH": str(folders["undisturbed"])}
    )
    assert done.returncode == 0, done.stderr
    undisturbed = (folders["undisturbed"], done.stdout)

    assert cluster.wait(short) == "TIMEOUT"
    assert "batch TERM" in cluster.output(short)
    assert "DUE TO TIME LIMIT" in cluster.output(short)
    found = re.search(r"batch USR2 after (\d+) s", cluster.wait_for(early, " s\n"))
    assert found
    assert int(found[1]) < scaled_timeout(48)
    cluster.wait(early, "RUNNING", "TIMEOUT")  # where all this took 90 s

    assert cluster.wait(high) == "COMPLETED"
    out, err = following["preempted"].communicate(timeout=scaled_timeout(100))
    assert following["preempted"].returncode == 0, out + err
    assert cluster.restarts(preempted) == 1
    assert re.search(r"preempted by SIGUSR2 on node [01] \(n\d\): ranks have", out)
    assert re.search(r"made room at epoch 1 step [1-9]", out)
    assert_as_undisturbed(undisturbed, folders["preempted"], out)

    out, err = driver.communicate(timeout=scaled_timeout(100))
    output = outputs(folders["submitit"])
    assert "results [None, None]" in out, err + errors(folders["submitit"])
    assert cluster.restarts(task) == 1
    assert re.search(r"made room at epoch 1 step [1-9]", output)
    assert_as_undisturbed(undisturbed, folders["submitit"], output)

    out, err = following["late"].communicate(timeout=scaled_timeout(100))
    assert following["late"].returncode == 0, out + err
    assert cluster.restarts(late) == 1
    assert "ddplaunch: requeueing, 1 of 2" in out
    assert_as_undisturbed(undisturbed, folders["late"], out)
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
    out, err = following.communicate(timeout=scaled_timeout(100))
    assert following.returncode == 3, out + err
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
    following.communicate(timeout=scaled_timeout(100))
    assert following.returncode == 143
    assert (cluster.wait(job), cluster.restarts(job)) == ("CANCELLED", 0)
