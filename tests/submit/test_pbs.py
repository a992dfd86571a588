"""PBS: the script of a job, what its programs print, what is refused, and jobs that run with stand-ins of its programs.

``python -m tests.submit.test_pbs`` writes the golden files anew, to be read in the diff.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.errors import UsageError
from ddplaunch.submit.hosts_job import HostsJob
from ddplaunch.submit.pbs import log_path, script
from ddplaunch.submit.pbs_server import JobRecord, parse
from ddplaunch.submit.slurm import Setup
from tests.conftest import write
from tests.starts import LIGHT
from tests.submit.queue_programs import install

GOLDEN = Path(__file__).parent / "golden_pbs"

SMALLEST = HostsJob(
    command=["train.py"],
    interpreter="/opt/venv/bin/python",
    chdir="/data/wine",
    job_name="train.py",
)

JOBS = {
    "smallest": SMALLEST,
    "everything": replace(
        SMALLEST,
        command=["--max-restarts", "2", "train.py", "--", "--lr", "0.1", "--name", 'it\'s a "test"', "$HOME"],
        chdir="/data/my wine",
        job_name="wine",
        output="logs/wine.out",
        nodes=2,
        cpus_per_task=64,
        gpus_per_node="8",
        mem="200G",
        seconds=93784,
        partition="gpu",
        account="wine-2026",
        exclusive=True,
        more=["-P 'my project'", "-W depend=afterok:4711"],
        setup=[Setup("/data/my wine/env.sh", is_file=True), Setup("module load cuda/12")],
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    assert script(JOBS[name]) == (GOLDEN / f"{name}.sh").read_text()
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


@pytest.mark.parametrize(("typed", "written"), [("200G", "200gb"), ("200GB", "200gb"), ("64000", "64000mb")])
def test_memory_in_the_units_of_pbs(typed, written):
    assert f":mem={written}\n" in script(replace(SMALLEST, mem=typed))


def test_where_the_log_is():
    assert log_path(SMALLEST, "4711.pbs01") == "/data/wine/train.py.o4711"
    assert log_path(JOBS["everything"], "4711.pbs01") == "/data/my wine/logs/wine.out"


def test_what_fits_in_no_line():
    with pytest.raises(UsageError, match="does not fit in one line"):
        script(replace(SMALLEST, partition="a\nb"))


SHOWN = """Job Id: 4711.pbs01
    Job_Name = train.py
    job_state = {state}
{more}    Variable_List = PBS_O_HOME=/home/me,PBS_O_LANG=C.UTF-8,
\tPBS_O_WORKDIR=/data/wine

"""


@pytest.mark.parametrize(
    ("state", "more", "said"),
    [
        ("Q", "", "waits"),
        (
            "Q",
            "    comment = Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T\n\t: 16)\n",
            "waits: Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 16)",
        ),
        ("H", "", "waits, and is on hold"),
        ("R", "    comment = Job run at Mon Nov 23 at 10:00 on (n1:ncpus=8)\n", "is running"),
        ("S", "", "is suspended"),
        ("E", "    Exit_status = 7\n", "is ending"),
        ("F", "    Exit_status = 0\n", "completed (exit code 0)"),
        ("F", "    Exit_status = 7\n", "failed (exit code 7)"),
        ("F", "    Exit_status = 271\n", "was killed by signal 15 (exit code 143)"),
        ("F", "    Exit_status = -29\n", "reached its time limit (exit code 143)"),
        ("F", "    Exit_status = -27\n", "used more memory than it had (exit code 137)"),
        ("F", "    Exit_status = -1\n", "was not run by PBS (Exit_status -1) (exit code 1)"),
        ("F", "", "was deleted before it began (exit code 143)"),
    ],
)
def test_what_is_said_of_a_job(state, more, said):
    record = parse(SHOWN.format(state=state, more=more), "/data/wine/train.py.o4711")
    assert record is not None
    assert record.words == said
    assert (record.code is not None) == ("exit code" in said)


def test_an_answer_of_something_else():
    assert parse("Hello\n", "log") is None
    assert JobRecord("Z", "log").words == "is in state Z"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gres gpu:8", "--gres does not work with --scheduler pbs"),
        ("--gpus-per-node a100:8", "--gpus-per-node a100:8: PBS has no types of GPUs"),
        ("--mem 0", "--mem 0 does not work with --scheduler pbs"),
        ("--array 0-3", "--array does not work with --scheduler pbs"),
        ("--requeue 3", "--requeue does not work with --scheduler pbs"),
        ("--dependency afterok:7", "--dependency does not work with --scheduler pbs"),
        ("--sbatch-arg=--hint=nomultithread", "--sbatch-arg does not work with --scheduler pbs"),
        ("--pe mpi", "--pe mpi needs --scheduler sge"),
        ("--qsub-arg=-V", "--qsub-arg -V: ddplaunch sets -V itself"),
        ("--qsub-arg=-lselect=2", "--qsub-arg -lselect=2: ddplaunch sets select itself"),
        ("--qsub-arg=exclusive", "--qsub-arg exclusive: expected an option of qsub"),
        ("--output logs/%j.out", "--output logs/%j.out: PBS has no patterns, and reads a colon as a host's name"),
    ],
)
def test_what_is_refused(answer, tmp_path, words, said):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--scheduler", "pbs", "--dry-run", *words.split(), "train.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"Error: {said}"
    assert 1 < len(done.stderr.splitlines()) <= 3


def test_a_machine_without_it(answer, tmp_path):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--scheduler", "pbs", "train.py", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "qsub is not on PATH: this machine has no commands of PBS" in done.stderr


def test_a_name_that_pbs_takes(answer, tmp_path):
    write(tmp_path, "my train.py", "")
    done = answer("submit", "--scheduler", "pbs", "--dry-run", "my train.py")
    assert "#PBS -N my_train.py\n" in done.stdout


PROGRAM = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["SET"], *sys.argv[1:], flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(7)
if "wait" in sys.argv:
    time.sleep(600)
"""

SUBMIT = ("submit", "--scheduler", "pbs", "--nodes", "2", "--cpus-per-task", "4", "--nproc", "2", *LIGHT)


@pytest.fixture
def here(tmp_path):
    """The variables of a shell that has PBS; the job's folder is the test's."""
    write(tmp_path, "train.py", PROGRAM)
    write(tmp_path, "env.sh", "export SET=$((40 + 2))")
    return install(tmp_path / "pbs", "qsub", "qstat", "qdel", "pbsdsh")


@pytest.mark.slow
def test_a_job_on_two_nodes_is_followed_to_its_end(launch, tmp_path, here):
    done = launch(*SUBMIT, "--follow", "--setup", "env.sh", "train.py", "--", "fail", 'it\'s "one"', "$HOME", env=here)
    assert done.returncode == 7, done.stdout + done.stderr
    number = done.stderr.partition("job ")[2].partition(".pbs01")[0]
    assert f"ddplaunch: log: {tmp_path}/train.py.o{number}\n" in done.stderr
    assert f"ddplaunch: cancel: qdel {number}.pbs01\n" in done.stderr
    ranks = [f'[{rank}] rank {rank} of 4 42 fail it\'s "one" $HOME' for rank in range(4)]
    assert sorted(line for line in done.stdout.splitlines() if "] rank" in line) == ranks, done.stdout
    assert "pbs: this is node 0 of 2, at 127.0.0.1 (PBS_JOBID, DDPLAUNCH_HOSTS, DDPLAUNCH_NODE_RANK;" in done.stdout
    assert done.stdout.count("rank 3 exited with code 7") == 1, "one report for all nodes"
    assert f"job {number}.pbs01 failed (exit code 7)" in done.stderr


@pytest.mark.slow
def test_a_deleted_job_stops_its_ranks_in_their_grace(start, tmp_path, here):
    job = start(*SUBMIT, "--follow", "--setup", "env.sh", "train.py", "wait", env=here)
    job.wait_for("rank", times=4)
    number = job.stderr().partition("cancel: qdel ")[2].split()[0]
    subprocess.run([tmp_path / "pbs/bin/qdel", number], check=True)
    assert job.wait() == 143, job.stdout() + job.stderr()
    assert f"job {number} failed (exit code 143)" in job.stderr()
    job.assert_nothing_left()


def test_a_job_that_qsub_refuses(answer, here):
    done = answer("submit", "--scheduler", "pbs", "--partition", "nowhere", "train.py", env=here)
    assert done.returncode == 2
    assert "qsub: Unknown queue\n" in done.stderr
    assert "Error: qsub refused the job (exit code 170)\n  qsub says why above; qstat -Q lists" in done.stderr


if __name__ == "__main__":
    for name, job in JOBS.items():
        (GOLDEN / f"{name}.sh").write_text(script(job))
