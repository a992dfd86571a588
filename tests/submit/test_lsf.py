"""LSF: the script of a job, what its programs print, what is refused, and jobs that run with stand-ins of its programs.

``python -m tests.submit.test_lsf`` writes the golden files anew, to be read in the diff.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.submit.hosts_job import HostsJob
from ddplaunch.submit.lsf import log_path, script
from ddplaunch.submit.lsf_batch import end_of, parse
from ddplaunch.submit.slurm import Setup
from tests.conftest import write
from tests.starts import LIGHT
from tests.submit.queue_programs import install
from tests.submit.test_pbs import PROGRAM

GOLDEN = Path(__file__).parent / "golden_lsf"

SMALLEST = HostsJob(command=["train.py"], interpreter="/opt/venv/bin/python", chdir="/data/wine", job_name="train.py")

JOBS = {
    "smallest": SMALLEST,
    "everything": replace(
        SMALLEST,
        command=["--max-restarts", "2", "train.py", "--", "--lr", "0.1", "--name", 'it\'s a "test"', "$HOME"],
        chdir="/data/my wine",
        job_name="wine",
        output="logs/%J.out",
        nodes=2,
        cpus_per_task=64,
        gpus_per_node="8",
        seconds=93784,
        partition="gpu",
        account="wine-2026",
        exclusive=True,
        more=["-R 'rusage[mem=200G]'", "-w 'done(4711) && done(4712)'"],
        setup=[Setup("/data/my wine/env.sh", is_file=True), Setup("module load cuda/12")],
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    assert script(JOBS[name]) == (GOLDEN / f"{name}.sh").read_text()
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


def test_where_the_log_is():
    assert log_path(SMALLEST, "4711") == "/data/wine/lsf-4711.out"
    assert log_path(JOBS["everything"], "4711") == "/data/my wine/logs/4711.out"


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("PEND|-|-", "waits"),
        ("PSUSP|-|-", "waits, and is on hold"),
        ("RUN|-|-", "is running"),
        ("UNKWN|-|-", "runs on a host that does not answer"),
        ("NEW|-|-", "is in state NEW"),
        ("DONE|-|-", "completed (exit code 0)"),
        ("EXIT|7|-", "failed (exit code 7)"),
        (
            "EXIT|140|TERM_RUNLIMIT: job killed after reaching LSF run time limit",
            "reached its time limit (exit code 143)",
        ),
        (
            "EXIT|137|TERM_MEMLIMIT: job killed after reaching LSF memory usage limit",
            "used more memory than it had (exit code 137)",
        ),
        ("EXIT|130|TERM_OWNER: job killed by owner", "was killed: LSF says TERM_OWNER (exit code 130)"),
        ("EXIT|-|TERM_OWNER: job killed by owner", "was killed before it began (exit code 143)"),
    ],
)
def test_what_is_said_of_a_job(shown, said):
    record = parse(f"{shown}\n", "/data/wine/lsf-4711.out")
    assert record is not None
    assert record.words == said
    assert (record.code is not None) == ("exit code" in said)


def test_an_answer_of_something_else():
    assert parse("LSF is down. Please wait ...\n", "log") is None


HISTORY = """
Job <4711>, User <me>, Project <default>, Command <#!/bin/bash;# Written by ddp
                     launch submit>
Mon Nov 23 10:00:00: Submitted from host <login1>, to Queue <normal>, CWD </data/wine>;
{end}
"""


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("Mon Nov 23 10:05:00: Starting (Pid 31390);", None),
        ("Mon Nov 23 10:05:00: Done successfully. The CPU time used is 1.2 seconds;", (0, "completed")),
        (
            "Mon Nov 23 10:05:00: Exited with exit code 7. The CPU time used is 1.2 s\n                     econds;",
            (7, "failed"),
        ),
        (
            "Mon Nov 23 10:05:00: Exited with exit cod\n                     e 140. The CPU time used is 1.2 seconds;\n"
            "Mon Nov 23 10:05:00: Completed <exit>; TERM_RUNLIMIT: job killed after reaching\n"
            "                      LSF run time limit;",
            (143, "reached its time limit"),
        ),
    ],
)
def test_what_bhist_knows_of_a_job(end, found):
    assert end_of(HISTORY.format(end=end)) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mem 200G", "--mem does not work with --scheduler lsf"),
        ("--gpus-per-node a100:8", "--gpus-per-node a100:8: here it is a number"),
        ("--array 0-3", "--array does not work with --scheduler lsf"),
        ("--requeue 3", "--requeue does not work with --scheduler lsf"),
        ("--qsub-arg=-V", "--qsub-arg -V needs --scheduler sge or pbs"),
        ("--bsub-arg=-q", "--bsub-arg -q: ddplaunch sets -q itself"),
        ("--bsub-arg=-Rspan[hosts=1]", "--bsub-arg -Rspan[hosts=1]: ddplaunch sets span itself"),
        ("--bsub-arg=exclusive", "--bsub-arg exclusive: expected an option of bsub"),
        ("--output logs/%I.out", "--output logs/%I.out: % is not a pattern here"),
    ],
)
def test_what_is_refused(answer, tmp_path, words, said):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--scheduler", "lsf", "--dry-run", *words.split(), "train.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"Error: {said}"
    assert 1 < len(done.stderr.splitlines()) <= 3


def test_a_machine_without_it(answer, tmp_path):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--scheduler", "lsf", "train.py", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "bsub is not on PATH: this machine has no commands of LSF" in done.stderr


SUBMIT = ("submit", "--scheduler", "lsf", "--nodes", "2", "--cpus-per-task", "4", "--nproc", "2", *LIGHT)


@pytest.fixture
def here(tmp_path):
    """The variables of a shell that has LSF; the job's folder is the test's."""
    write(tmp_path, "train.py", PROGRAM)
    write(tmp_path, "env.sh", 'export SET=$((40 + 2))\nread -r word; [ -z "$word" ]')
    return install(tmp_path / "lsf", "bsub", "bjobs", "bkill", "blaunch")


@pytest.mark.slow
def test_a_job_on_two_nodes_is_followed_to_its_end(launch, tmp_path, here):
    done = launch(*SUBMIT, "--follow", "--setup", "env.sh", "train.py", "--", "fail", 'it\'s "one"', "$HOME", env=here)
    assert done.returncode == 7, done.stdout + done.stderr
    number = done.stderr.partition("job ")[2].partition(":")[0]
    assert f"ddplaunch: log: {tmp_path}/lsf-{number}.out\n" in done.stderr
    assert f"ddplaunch: cancel: bkill {number}\n" in done.stderr
    ranks = [f'[{rank}] rank {rank} of 4 42 fail it\'s "one" $HOME' for rank in range(4)]
    assert sorted(line for line in done.stdout.splitlines() if "] rank" in line) == ranks, done.stdout
    assert "lsf: this is node 0 of 2, at 127.0.0.1 (LSB_JOBID, DDPLAUNCH_HOSTS, DDPLAUNCH_NODE_RANK;" in done.stdout
    assert done.stdout.count("rank 3 exited with code 7") == 1, "one report for all nodes"
    assert f"job {number} failed (exit code 7)" in done.stderr


@pytest.mark.slow
def test_a_killed_job_stops_its_ranks_in_their_grace(start, tmp_path, here):
    job = start(*SUBMIT, "--follow", "--setup", "env.sh", "train.py", "wait", env=here)
    job.wait_for("rank", times=4)
    number = job.stderr().partition("cancel: bkill ")[2].split()[0]
    subprocess.run([tmp_path / "lsf/bin/bkill", number], check=True)
    assert job.wait() == 130, job.stdout() + job.stderr()
    assert f"job {number} was killed: LSF says TERM_OWNER (exit code 130)" in job.stderr()
    job.assert_nothing_left()


def test_a_job_that_bsub_refuses(answer, here):
    done = answer("submit", "--scheduler", "lsf", "--partition", "nowhere", "train.py", env=here)
    assert done.returncode == 2
    assert "nowhere: No such queue. Job not submitted.\n" in done.stderr
    assert "Error: bsub refused the job (exit code 255)\n  bsub says why above; bqueues lists" in done.stderr


if __name__ == "__main__":
    for name, job in JOBS.items():
        (GOLDEN / f"{name}.sh").write_text(script(job))
