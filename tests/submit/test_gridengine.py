"""The script of a Grid Engine job, what its programs print, and what ``submit --scheduler sge`` refuses.

``python -m tests.submit.test_gridengine`` writes the golden files anew, to be read in the diff.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.errors import UsageError
from ddplaunch.submit.gridengine import GridJob, log_path, script
from ddplaunch.submit.qmaster import JobRecord, end_of, state_of
from ddplaunch.submit.slurm import Setup
from tests.conftest import write

GOLDEN = Path(__file__).parent / "golden_gridengine"

SMALLEST = GridJob(
    command=["train.py"],
    interpreter="/opt/venv/bin/python",
    chdir="/data/wine",
    job_name="train.py",
    output="sge-$JOB_ID.out",
    pe="mpi",
)

JOBS = {
    "smallest": SMALLEST,
    "everything": replace(
        SMALLEST,
        command=["--max-restarts", "2", "train.py", "--", "--lr", "0.1", "--name", 'it\'s a "test"', "$HOME"],
        chdir="/data/my wine",
        job_name="wine",
        output="logs/$JOB_ID.out",
        nodes=2,
        cpus_per_task=4,
        seconds=14400,
        partition="gpu.q",
        qsub_args=["-l gpu=8", "-P 'my project'"],
        setup=[Setup("/data/my wine/env.sh", is_file=True), Setup("module load cuda/12")],
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    assert script(JOBS[name]) == (GOLDEN / f"{name}.sh").read_text()
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


@pytest.fixture
def run(tmp_path):
    """Run a script as Grid Engine does on the first of these hosts; its qrsh, like the real one, joins its words.

    The job's Python writes down what it gets, and exits with 7.
    """
    python = f"""
        #!{sys.executable}
        import json, os, sys
        names = ("DDPLAUNCH_HOSTS", "DDPLAUNCH_NODE_RANK")
        with open("node-" + os.environ[names[1]], "w") as file:
            json.dump([sys.argv[3:], [os.environ[name] for name in names], sys.stdin.read()], file)
        sys.exit(7)
        """
    qrsh = """
        #!/bin/bash
        [ "$1 $2" = "-inherit -V" ] || exit 1
        shift 3
        exec /bin/sh -c "$*"
        """
    write(tmp_path, "bin/python", python).chmod(0o755)
    write(tmp_path, "bin/qrsh", qrsh).chmod(0o755)

    def begin(job: GridJob, hosts: str) -> tuple[subprocess.CompletedProcess[str], list[list[object]]]:
        write(tmp_path, "hostfile", hosts)
        told = {"PE_HOSTFILE": f"{tmp_path}/hostfile", "PE": "mpi", "NSLOTS": "2"}
        done = subprocess.run(
            ["bash"],
            input=script(replace(job, interpreter=f"{tmp_path}/bin/python", setup=())),
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **told},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node-*"))]

    return begin


def test_every_node_gets_the_words_as_they_were_typed(run):
    done, nodes = run(JOBS["everything"], "n1 4 all.q@n1 UNDEFINED\nn2 2 a.q@n2 UNDEFINED\nn2 2 b.q@n2 UNDEFINED\n")
    assert (done.returncode, done.stderr) == (7, ""), "the exit code of node 0 is the job's"
    words = ["run", "--cluster", "sge", *JOBS["everything"].command]
    assert nodes == [[words, ["n1,n2", "0"], ""], [words, ["n1,n2", "1"], ""]]


def test_slots_that_do_not_make_the_nodes(run):
    done, nodes = run(JOBS["everything"], "n1 8 all.q@n1 UNDEFINED\n")
    assert (done.returncode, nodes) == (2, [])
    assert done.stderr.splitlines() == [
        "ddplaunch: --nodes 2 needs as many hosts, but mpi gave 2 slots on: n1",
        "  qconf -sp mpi shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N",
    ]


def test_where_the_log_is():
    assert log_path(JOBS["everything"], "4711") == "/data/my wine/logs/4711.out"


def test_what_fits_in_no_line():
    with pytest.raises(UsageError, match="does not fit in one line"):
        script(replace(SMALLEST, job_name="a\nb"))


LISTED = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>7</JB_job_number>
      <state>r</state>
    </job_list>
  </queue_info>
  <job_info>
    <job_list state="pending">
      <JB_job_number>17</JB_job_number>
      <state>Eqw</state>
    </job_list>
  </job_info>
</job_info>
"""


@pytest.mark.parametrize(("number", "state"), [("7", "r"), ("17", "Eqw"), ("1", None)])
def test_the_state_of_a_job(number, state):
    assert state_of(LISTED, number) == state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("qw", "waits"),
        ("hqw", "waits, and is on hold"),
        ("r", "is running"),
        ("dr", "is being deleted"),
        ("Eqw", "is in an error state, Eqw, and will not start: qstat -explain E says why"),
        ("ended", "has ended; qacct does not show it yet"),
    ],
)
def test_what_is_said_of_a_state(state, said):
    assert JobRecord(state, "/data/wine/sge-7.out").words == said


ACCOUNTED = """==============================================================
qname        all.q
hostname     n2
jobnumber    7
failed       0
exit_status  {task}
==============================================================
qname        all.q
hostname     n1
jobnumber    7
failed       {failed}
exit_status  {code}
ru_wallclock 1s
"""


@pytest.mark.parametrize(
    ("failed", "code", "ended"),
    [
        ("0", "0", (0, "completed")),
        ("0", "7", (7, "failed")),
        ("100 : assumedly after job", "137                  (Killed)", (137, "was killed by signal 9")),
        ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", "137", (143, "reached its time limit")),
        ("26  : opening input/output file", "0", (1, "failed: Grid Engine says 26  : opening input/output file")),
    ],
)
def test_how_a_job_ended(failed, code, ended):
    assert end_of(ACCOUNTED.format(task="1", failed=failed, code=code)) == ended


def test_a_job_that_qacct_does_not_show():
    assert end_of("no jobs running since startup\n") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--scheduler sge needs --pe NAME, a parallel environment"),
        ("--pe mpi --gpus-per-node 8", "--gpus-per-node does not work with --scheduler sge"),
        ("--pe mpi --array 0-3", "--array does not work with --scheduler sge"),
        ("--pe mpi --exclusive", "--exclusive does not work with --scheduler sge"),
        ("--pe mpi --dependency afterok:7", "--dependency does not work with --scheduler sge"),
        ("--pe mpi --teardown hostname", "--teardown does not work with --scheduler sge"),
        ("--pe mpi --sbatch-arg=--hint=nomultithread", "--sbatch-arg does not work with --scheduler sge"),
        ("--pe mpi --qsub-arg=-V", "--qsub-arg -V: ddplaunch sets -V itself"),
        ("--pe mpi --qsub-arg=exclusive", "--qsub-arg exclusive: expected an option of qsub"),
    ],
)
def test_what_is_refused(answer, tmp_path, words, said):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--scheduler", "sge", "--dry-run", *words.split(), "train.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"Error: {said}"
    assert 1 < len(done.stderr.splitlines()) <= 3


def test_what_is_for_grid_engine_alone(answer, tmp_path):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--dry-run", "--pe", "mpi", "train.py")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "Error: --pe mpi needs --scheduler sge")


def test_a_machine_without_it(answer, tmp_path):
    write(tmp_path, "train.py", "")
    done = answer("submit", "--scheduler", "sge", "--pe", "mpi", "train.py", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "qsub is not on PATH: this machine has no commands of Grid Engine" in done.stderr


def test_a_token_that_everyone_can_read(answer, tmp_path):
    write(tmp_path, "train.py", "")
    words = ("submit", "--scheduler", "sge", "--pe", "mpi", "--dry-run", "train.py")
    done = answer(*words, env={"DDPLAUNCH_TOKEN": "s3cret"})
    assert "note: DDPLAUNCH_TOKEN is no secret in this job: qstat -j shows" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_the_site_may_choose_it_in_a_file(answer, tmp_path):
    write(tmp_path, "train.py", "")
    write(tmp_path, "pyproject.toml", '[tool.ddplaunch.submit]\nscheduler = "sge"\npe = "mpi"\n')
    done = answer("submit", "--dry-run", "--nodes", "2", "--time", "1:30:00", "train.py")
    assert done.returncode == 0, done.stderr
    assert "#$ -pe mpi 2\n#$ -l h_rt=5400\n" in done.stdout


if __name__ == "__main__":
    for name, job in JOBS.items():
        (GOLDEN / f"{name}.sh").write_text(script(job))
