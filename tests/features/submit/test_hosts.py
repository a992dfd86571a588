"""Tests of what Grid Engine, PBS and LSF share: refused options, and a job on two nodes."""

import re
import signal

import pytest

from tests.conftest import assert_refused, conflict, write_program
from tests.features.submit.queue_programs import PROGRAMS_OF, Job, install
from tests.features.submit.states import REJECTED, SHORT_INTERVALS
from tests.start_modes import LIGHT


@pytest.mark.parametrize(
    ("scheduler", "words", "expected"),
    [
        ("sge", "", "--scheduler sge needs --pe NAME, a parallel environment"),
        ("sge", "--pe mpi --gpus-per-node 8", conflict("--gpus-per-node", "--scheduler sge")),
        ("sge", "--pe mpi --array 0-3", "--array 0-3: indices start at 1 here"),
        ("sge", "--pe mpi --array 1,5", "--array 1,5: --scheduler sge accepts one range only"),
        ("sge", "--pe mpi --array 1-4 --follow", f"{conflict('--follow', '--array 1-4')}: each job has its own log"),
        ("sge", "--pe mpi --requeue 3", "--requeue 3 needs --time with --scheduler sge"),
        ("sge", "--pe mpi --exclusive", conflict("--exclusive", "--scheduler sge")),
        ("sge", "--pe mpi --dependency afterok:7", conflict("--dependency", "--scheduler sge")),
        ("sge", "--pe mpi --teardown hostname", conflict("--teardown", "--scheduler sge")),
        ("sge", "--pe mpi --sbatch-arg=--hint=nomultithread", conflict("--sbatch-arg", "--scheduler sge")),
        ("sge", "--pe mpi --qsub-arg=-V", "--qsub-arg -V: ddplaunch sets -V itself"),
        ("sge", "--pe mpi --qsub-arg=exclusive", "--qsub-arg exclusive: expected an option of qsub"),
        ("pbs", "--gres gpu:8", conflict("--gres", "--scheduler pbs")),
        ("pbs", "--gpus-per-node a100:8", "--gpus-per-node a100:8: PBS does not distinguish types of GPUs"),
        ("pbs", "--mem 0", conflict("--mem 0", "--scheduler pbs")),
        ("pbs", "--array 1,5", "--array 1,5: --scheduler pbs accepts one range only"),
        ("pbs", "--array 3", "--array 3: expected a range of two or more"),
        ("pbs", "--array 0-3 --output wine.out", "--output wine.out: each job of an array needs a log of its own"),
        ("pbs", "--requeue 3", conflict("--requeue", "--scheduler pbs")),
        ("pbs", "--dependency afterok:7", conflict("--dependency", "--scheduler pbs")),
        ("pbs", "--sbatch-arg=--hint=nomultithread", conflict("--sbatch-arg", "--scheduler pbs")),
        ("pbs", "--pe mpi", "--pe mpi needs --scheduler sge"),
        ("pbs", "--qsub-arg=-V", "--qsub-arg -V: ddplaunch sets -V itself"),
        ("pbs", "--qsub-arg=-lselect=2", "--qsub-arg -lselect=2: ddplaunch sets select itself"),
        ("pbs", "--qsub-arg=exclusive", "--qsub-arg exclusive: expected an option of qsub"),
        ("pbs", "--output logs/%j.out",
         "--output logs/%j.out: PBS has no patterns, and reads a colon as a host's name"),
        ("lsf", "--mem 200G", conflict("--mem", "--scheduler lsf")),
        ("lsf", "--gpus-per-node a100:8", "--gpus-per-node a100:8: expected a number with --scheduler lsf"),
        ("lsf", "--array 0-3", "--array 0-3: indices start at 1 here"),
        ("lsf", "--spares 1",
         "--spares needs an application profile of the site, with DJOB_COMMFAIL_ACTION=IGNORE_COMMFAIL"),
        ("lsf", "--qsub-arg=-V", "--qsub-arg -V needs --scheduler sge or pbs"),
        ("lsf", "--bsub-arg=-q", "--bsub-arg -q: ddplaunch sets -q itself"),
        ("lsf", "--bsub-arg=-Rspan[hosts=1]", "--bsub-arg -Rspan[hosts=1]: ddplaunch sets span itself"),
        ("lsf", "--bsub-arg=exclusive", "--bsub-arg exclusive: expected an option of bsub"),
        ("lsf", "--output logs/%a.out", "--output logs/%a.out: % is not a pattern here"),
    ],
)  # fmt: skip
def test_invalid_host_options_are_refused(run_in_fork, tmp_path, scheduler, words, expected):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("submit", "--scheduler", scheduler, "--dry-run", *words.split(), "train.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"Error: {expected}"
    assert 1 < len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    ("words", "passed", "name", "shows"),
    [
        ("sge --pe mpi --qsub-arg=-js=7", "qsub-arg: -js=7 (--qsub-arg)", '#$ -N "my train.py"', "qstat -j"),
        ("pbs --output wine.log --qsub-arg=-Pwine", "qsub-arg: -Pwine (--qsub-arg)", "#PBS -N my_train.py", "qstat -f"),
        ("lsf --bsub-arg=-N --bsub-arg=-B", "bsub-arg: -N, -B (--bsub-arg)", "#BSUB -J my_train.py", "bjobs -env"),
    ],
)
def test_a_dry_run_shows_what_is_passed_on(run_in_fork, tmp_path, words, passed, name, shows):
    """It also shows the job name, which the scheduler must accept, and a note on a token that others can read."""
    write_program(tmp_path, "my train.py", "")
    line = ("submit", "--dry-run", "--scheduler", *words.split(), "my train.py")
    done = run_in_fork(*line, env={"DDPLAUNCH_TOKEN": "s3cret"})
    assert passed in done.stderr.splitlines()
    assert name in done.stdout.splitlines()
    assert f"note: DDPLAUNCH_TOKEN is not secret in this job: {shows} shows" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


PROGRAM = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["SET"], *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    open("printed-" + os.environ["RANK"], "w").close()
    if os.environ["RANK"] == "3":
        while not all(os.path.exists(f"printed-{rank}") for rank in range(4)):
            time.sleep(0.01)  # its failure stops the others, of which one may not have printed
        sys.exit(7)
if "wait" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def here(tmp_path):
    """Give the variables of a shell that has a scheduler; the job's folder is the test's."""
    write_program(tmp_path, "train.py", PROGRAM)
    write_program(tmp_path, "env.sh", 'export SET=$((40 + 2))\nread -r word; [ -z "$word" ]')
    return lambda scheduler: install(tmp_path / scheduler, *PROGRAMS_OF[scheduler])


def followed(scheduler: str, *words: str) -> tuple[str, ...]:
    size = ("--nodes", "2", "--cpus-per-task", "4", "--nproc", "2")
    return ("submit", "--scheduler", scheduler, *size, *LIGHT, "--follow", "--setup", "env.sh", "train.py", *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "number", "log", "variable"),
    [("pbs", "{}.pbs01", "train.py.o{}", "PBS_JOBID"), ("lsf", "{}", "lsf-{}.out", "LSB_JOBID")],
)
def test_a_job_on_two_nodes_is_followed_to_its_end(run_in_fork, tmp_path, here, scheduler, number, log, variable):
    words = followed(scheduler, "--", "fail", 'it\'s "one"', "$HOME")
    done = run_in_fork(*words, env={**SHORT_INTERVALS, **here(scheduler)})
    assert done.returncode == 7, done.stdout + done.stderr
    digits = re.findall(r"job (\d+)", done.stderr)[0]
    number = number.format(digits)
    assert f"ddplaunch: log: {tmp_path}/{log.format(digits)}\n" in done.stderr
    assert f"ddplaunch: cancel: ddplaunch stop {number}\n" in done.stderr
    ranks = [f'[{rank}] rank {rank} of 4 42 fail it\'s "one" $HOME' for rank in range(4)]
    assert sorted(line for line in done.stdout.splitlines() if "] rank" in line) == ranks, done.stdout
    node = f"{scheduler}: this is node 0 of 2, at 127.0.0.1 ({variable}, DDPLAUNCH_HOSTS, DDPLAUNCH_NODE_RANK;"
    assert node in done.stdout
    assert done.stdout.count("rank 3 exited with code 7") == 1, "one report for all nodes"
    assert f"job {number} failed (exit code 7)" in done.stderr


@pytest.mark.slow
def test_a_job_of_lsf_is_requeued(start_ddplaunch, tmp_path, here):
    """LSF warns all processes of the script, and starts it again after exit code 99 (bsub(1), -wa and -Q)."""
    program = PROGRAM.replace(
        "    time.sleep(600)", "    from ddplaunch import runtime\n    while not runtime.preempted(): time.sleep(0.02)"
    )
    write_program(tmp_path, "train.py", program)
    words = followed("lsf", "wait")
    job = start_ddplaunch(*words[:1], "--requeue", "1", "--time", "1:00:00", *words[1:], env=here("lsf"))
    submitted = job.stderr
    for times in (1, 2):
        job.wait_for("] rank", times=4 * times)
        number = submitted().partition("cancel: ddplaunch stop ")[2].split()[0]
        Job(tmp_path / "lsf", number).signal(signal.SIGUSR2)
        job.wait_for("to save a checkpoint", times=times)
    assert job.wait() == 75, job.stdout() + job.stderr()
    assert "ddplaunch: requeueing, 1 of 1\n" in job.stdout()
    assert "ddplaunch: not requeued again: --requeue 1\n" in job.stdout()
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("scheduler", "theirs", "ours"),
    [
        ("pbs", "qsub: Unknown queue\n",
         f"qsub {REJECTED} 170)\n  see its message above; qstat -Q lists"),
        ("lsf", "nowhere: No such queue. Job not submitted.\n",
         f"bsub {REJECTED} 255)\n  see its message above; bqueues lists"),
    ],
)  # fmt: skip
def test_a_job_that_its_scheduler_refuses(run_in_fork, here, scheduler, theirs, ours):
    done = run_in_fork("submit", "--scheduler", scheduler, "--partition", "nowhere", "train.py", env=here(scheduler))
    assert_refused(done, theirs, f"Error: {ours}")
