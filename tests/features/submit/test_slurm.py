"""Tests of Slurm: what its batch script does, and reading the output of its programs."""

import json
import os
import shlex
import sys
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.cli import launcher_command
from ddplaunch.features.submit import slurm
from ddplaunch.features.submit.batch_job import BatchJob, SetupCommand
from ddplaunch.features.submit.slurm import Slurm
from ddplaunch.features.submit.slurm_output import parse_scontrol, parse_squeue
from ddplaunch.system.schedulers.scheduler import JobId
from tests.conftest import run_command, write_program
from tests.features.submit.states import OUT_OF_MEMORY
from tests.features.submit.test_scripts import JOBS, SMALLEST


@pytest.fixture
def run(tmp_path):
    """Run a script as the batch shell of two nodes does, with an srun that writes down its words.

    It exits with the code ``srun`` (or signals the shell), and node 0 has ``left`` its own.
    """
    program = f"""
        #!{sys.executable}
        import json, os, signal, sys
        json.dump([sys.argv[1:], dict(os.environ)], open("srun.json", "w"))
        if os.environ["LEFT"]:
            open(os.environ["DDPLAUNCH_EXIT_FILE"], "w").write(os.environ["LEFT"])
        if os.environ["SRUN"] in ("TERM", "USR1"):
            os.kill(os.getppid(), signal.Signals["SIG" + os.environ["SRUN"]])
            sys.exit(143)
        if os.environ["SRUN"] == "USR2":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            os.kill(os.getppid(), signal.SIGUSR2)
            sys.exit(75 if signal.sigtimedwait([signal.SIGUSR2], 20) else 1)
        if os.environ["SRUN"] == "waits":
            signal.pause()
        sys.exit(int(os.environ["SRUN"]))
        """
    write_program(tmp_path, "bin/srun", program).chmod(0o755)

    def begin(job: BatchJob, srun: int | str = 7, left: str = ""):
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "64",
            "SLURM_JOB_ID": "12",
            "SRUN": str(srun),
            "LEFT": left,
        }
        script = Slurm().render_script(job).replace("sleep 5 ", "sleep 0.1 ")
        done = run_command(["bash"], tmp_path, environment, input=script)
        record = tmp_path / "srun.json"
        return (done, *(json.loads(record.read_text()) if record.exists() else (None, None)))

    return begin


@pytest.mark.parametrize("name", ["smallest", "two_nodes", "container"])
def test_the_command_line_of_srun(run, name):
    job = JOBS[name]
    done, words, _ = run(job)
    assert done.returncode == 7, "its exit code is the job's"
    begin = words.index(job.interpreter)
    assert words[begin:] == [*launcher_command(job.interpreter), "run", "--cluster", "slurm", *job.command]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(words[:begin])
    assert ("--cpus-per-task=64" in words) == (job.cpus_per_task is not None)
    assert ("--container-workdir=/data/wine" in words) == (name == "container")


AGAIN = "ddplaunch: requeueing, 1 of 3\nrequeue 12\nddplaunch: "
EXCLUDED = "update JobId=12 ExcNodeList="


@pytest.mark.parametrize(
    ("srun", "left", "job", "code", "expected"),
    [
        (137, "0\n", SMALLEST, 0, ""),  # a task was killed, and the job went on with a spare
        (137, "", SMALLEST, 137, ""),  # node 0 was
        (137, "7\n", replace(SMALLEST, teardown=[SetupCommand("echo torn")]), 7, "torn\n"),
        (137, "75\n", JOBS["requeue"], 0, "ddplaunch: requeueing, 1 of 3\nrequeue 12\n"),
        (75, "", JOBS["requeue"], 0, "ddplaunch: requeueing, 1 of 3\nrequeue 12\n"),
        (137, "0\n", JOBS["requeue"], 0, ""),
        (143, "143\n", JOBS["requeue"], 143, ""),  # not preempted
        ("TERM", "75\n", JOBS["requeue"], 75, ""),  # it was cancelled after the warning
        ("USR1", "0\n", SMALLEST, 0, ""),
        ("USR2", "", JOBS["requeue"], 0, "ddplaunch: requeueing, 1 of 3\nrequeue 12\n"),  # scancel --batch
        (69, "1\nn2.site\n", JOBS["requeue_on"], 0, f"{AGAIN}without n2, which has failed\n{EXCLUDED}n2\n"),
        (1, "1\n", JOBS["requeue_on"], 0, f"{AGAIN[:-11]}"),  # no node is known to have failed
        (75, "75\nn2\n", JOBS["requeue_on"], 0, f"{AGAIN[:-11]}"),  # preempted
        (3, "3\nn2\n", JOBS["requeue_on"], 3, ""),
        (1, "1\nn2\n", replace(JOBS["requeue_on"], nodelist="n[1-2]"), 0, f"{AGAIN[:-11]}"),
        (9, "", JOBS["spares"], 9, ""),
        ("waits", "7\n", JOBS["spares"], 7, ""),  # for a node that came back
    ],
)
def test_the_exit_code_is_node_0s(run, tmp_path, monkeypatch, srun, left, job, code, expected):
    monkeypatch.setattr(slurm, "SRUN_EXIT_TIMEOUT_S", 0.1)
    write_program(tmp_path, "bin/scontrol", "#!/bin/sh\necho $*\n").chmod(0o755)
    write_program(tmp_path, ".ddplaunch-exit-12", "1\n")  # an earlier run's
    begun, words, _ = run(job, srun=srun, left=left)
    assert (begun.returncode, begun.stdout) == (code, expected), begun.stderr
    if srun == "waits":
        assert begun.stderr == "ddplaunch: the job is over; srun still waits for a lost node and is killed\n"
    assert "--wait=0" in words, "no site's WaitTime ends those that go on"
    assert not (tmp_path / ".ddplaunch-exit-12").exists()


def test_setup_reaches_the_ranks(run, tmp_path):
    file = write_program(tmp_path, "my env.sh", "export FROM_FILE=1\n")
    done, _, variables = run(
        replace(SMALLEST, setup=[SetupCommand(str(file), True), SetupCommand("export FROM_LINE='2 3'")])
    )
    assert done.returncode == 7
    assert (variables["FROM_FILE"], variables["FROM_LINE"]) == ("1", "2 3")


def test_a_setup_that_fails_ends_the_job(run):
    done, words, _ = run(replace(SMALLEST, setup=[SetupCommand("no_such_command_here"), SetupCommand("echo on")]))
    assert done.returncode == 127
    assert "no_such_command_here" in done.stderr
    assert (words, done.stdout) == (None, "")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("sleep 0 &", 7),
        ("true; ", 7),
        ("true # all is well", 7),
        ("false # a comment", 1),
        (r"find /dev/null -exec false {} \; ; false", 1),
        (r"find /dev/null -exec true {} \;", 7),
        (r"find /dev/null -exec true {} \; ;", 7),
        ("cat <<END\nEND", 7),
        ("true &&\nfalse", 1),
    ],
)
def test_any_shell_command_can_be_a_setup(run, text, code):
    """The job starts after a command that succeeds, or runs in the background, and ends with one that fails."""
    teardown = [SetupCommand("(echo torn)"), SetupCommand("true # down")]
    done, _, _ = run(replace(SMALLEST, setup=[SetupCommand(text)], teardown=teardown))
    assert (done.returncode, done.stdout) == (code, "torn\n"), done.stderr


TORN = SetupCommand("echo torn $FROM_SETUP; exit 4")


@pytest.mark.parametrize(
    ("setup", "code", "expected"), [("FROM_SETUP=x", 7, "torn x\n"), ("false", 1, "torn\n"), ("exit 3", 3, "torn\n")]
)
def test_a_teardown_keeps_the_exit_code(run, setup, code, expected):
    """The exit code stays the job's after a teardown, also where the set-up fails or calls ``exit``."""
    done, _, _ = run(replace(SMALLEST, setup=[SetupCommand(setup)], teardown=[TORN, SetupCommand("no_such_command")]))
    assert (done.returncode, done.stdout) == (code, expected)
    assert "no_such_command" in done.stderr


def test_values_are_quoted_as_sbatch_reads_them():
    """A value is quoted for sbatch: quotes group, a backslash escapes (in quotes too), a bare # begins a comment."""
    for text in ("a b", "it's", 'say "x"', "back\\slash", "# no comment", "a#b", "tab\there", "$HOME", "`x`", "ä", ""):
        line = next(
            line for line in Slurm().render_script(replace(SMALLEST, job_name=text)).splitlines() if "job-name" in line
        )
        lexer = shlex.shlex(line.removeprefix("#SBATCH "), posix=True, punctuation_chars=False)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        assert list(lexer) == [f"--job-name={text}"]


RECORD = (
    "JobId=7 JobName=x JobState=1 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:00:02 TimeLimit=UNLIMITED PreemptTime={preempted} Command=(null) WorkDir=/data/my wine "
    "StdErr=/data/my wine/slurm-7.out StdIn=/dev/null StdOut=/data/my wine/slurm-7.out Power= \n"
)
"""What ``scontrol --oneliner show job 7`` of Slurm 22.05 prints, somewhat shortened."""


@pytest.mark.parametrize(
    ("state", "code", "ended", "expected"),
    [
        ("PENDING", "0:0", None, "waits"), ("RUNNING", "0:0", None, "is running"),
        ("COMPLETING", "3:0", None, "is completing"), ("REQUEUE_HOLD", "0:0", None, "is requeue hold"),
        ("COMPLETED", "0:0", 0, "completed"), ("FAILED", "3:0", 3, "failed"), ("FAILED", "0:9", 137, "failed"),
        ("FAILED", "0:0", 1, "failed"), ("CANCELLED", "0:15", 143, "was cancelled"),
        ("TIMEOUT", "0:0", 143, "reached its time limit"), ("DEADLINE", "0:0", 143, "passed its deadline"),
        ("OUT_OF_MEMORY", "0:125", 137, OUT_OF_MEMORY.partition(" (")[0]), ("NODE_FAIL", "0:0", 69, "lost a node"),
        ("PREEMPTED", "0:15", 75, "was preempted"),
    ],
)  # fmt: skip
def test_the_state_of_a_job_in_slurm(state, code, ended, expected):
    job = parse_scontrol(RECORD.format(state=state, reason="None", code=code, preempted="None"))
    assert (job.code, job.log_path, job.number) == (ended, "/data/my wine/slurm-7.out", "7")
    assert (job.is_pending, job.is_running) == (state == "PENDING", state == "RUNNING")
    assert job.description == (expected if ended is None else f"{expected} (exit code {ended})")


AT_NOON = "2026-01-31T12:00:00"
NEVER = "waits, and will never start:"


@pytest.mark.parametrize(
    ("state", "reason", "code", "preempted", "ended", "expected"),
    [
        # to Slurm a job that ends by itself when it is preempted is a script that failed
        ("FAILED", "NonZeroExitCode", "143:0", AT_NOON, 75, "was preempted"),
        ("FAILED", "NonZeroExitCode", "7:0", AT_NOON, 7, "failed (exit code 7)"),
        ("FAILED", "RaisedSignal:53", "0:53", "None", 2,
         "failed: Slurm could not open its log /data/my wine/slurm-7.out on the node (exit code 2)"),
        ("PENDING", "Resources", "0:0", "None", None, "waits: Resources"),
        ("PENDING", "QOSMaxCpuPerUserLimit", "0:0", "None", None, "waits: QOSMaxCpuPerUserLimit"),
        ("PENDING", "PartitionNodeLimit", "0:0", "None", None,
         f"{NEVER} PartitionNodeLimit (the job asks for more nodes than"),
        ("PENDING", "PartitionConfig", "0:0", "None", None, f"{NEVER} PartitionConfig (no node of the partition has"),
        ("PENDING", "QOSMaxNodePerJobLimit", "0:0", "None", None,
         f"{NEVER} QOSMaxNodePerJobLimit (the job alone exceeds it)"),
        ("PENDING", "AssocMaxWallDurationPerJobLimit", "0:0", "None", None, f"{NEVER} AssocMaxWallDurationPerJobLimit"),
        ("PENDING", "JobHeldUser", "0:0", "None", None, f"{NEVER} JobHeldUser (you hold it: scontrol release JOB)"),
    ],
)  # fmt: skip
def test_the_description_of_a_job(state, reason, code, preempted, ended, expected):
    job = parse_scontrol(RECORD.format(state=state, reason=reason, code=code, preempted=preempted))
    assert job.code == ended
    assert job.description.startswith(expected)


def test_the_first_job_of_an_array():
    text = RECORD.format(state="FAILED", reason="None", code="3:0", preempted="None")
    assert parse_scontrol(text).job is None
    text = text.replace("JobId=7", "JobId=8 ArrayJobId=7 ArrayTaskId=0")
    assert (parse_scontrol(text).job, parse_scontrol(text).number) == (JobId("7", index="0"), "8")


def test_a_job_that_was_requeued():
    text = RECORD.format(state="RUNNING", reason="None", code="0:0", preempted="None").replace("arts=0", "arts=2")
    assert getattr(parse_scontrol(text), "description", None) == "is running again (restart 2)"


def test_a_step_of_a_job_is_on_one_node_or_on_all():
    job = SimpleNamespace(image=None, nodes=2, cluster="c", cwd="/", python="py")
    for everywhere, host, nodes in ((True, "n1", "2"), (False, "n1", "1 --nodelist=n1"), (False, None, "1")):
        words, _ = Slurm().step_command(job, SimpleNamespace(number="7", host=host), ["ps"], everywhere=everywhere)
        assert f"srun -M c --overlap --jobid=7 --nodes={nodes[0]} " in " ".join(words)
        assert f" --ntasks-per-node={nodes.replace('2', '1')} --chdir=/ " in " ".join(words)


def test_several_jobs_in_squeue():
    """The columns of squeue 22.05 are parsed, with nothing between them; the log of 4021 could not be opened."""
    rows = (
        ("7", "7", "PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2]", "0", "1", "", "N/A"),
        ("8_0", "9", "RUNNING", "None", "0", "0", "n1", "N/A"),
        ("8_1", "10", "FAILED", "JobLaunchFailure", "4021", "0", "n1", "N/A"),
        ("8_2", "11", "FAILED", "NonZeroExitCode", "36608", "0", "n1", "2026-01-31T12:00:00"),
    )
    found = list(parse_squeue("".join("".join(map(str.ljust, row, WIDTHS)) + "\n" for row in rows)))
    assert [each.job.text for each in found] == ["7", "8_0", "8_1", "8_2"]
    assert [each.code for each in found] == [None, None, 2, 75]
    assert found[0].description == "was requeued and waits: ReqNodeNotAvail, UnavailableNodes:n[1-2]"
    assert (found[1].is_running, found[1].number, found[1].host) == (True, "9", "n1")


WIDTHS = (64, 16, 32, 96, 16, 12, 256, 24)


@pytest.mark.parametrize("output", ["slurm-%j.out", "/logs/%j.out"])
def test_a_folder_with_a_percent_sign(output):
    """A percent sign in the folder is not read as a pattern of sbatch."""
    job = replace(SMALLEST, chdir="/data/50%j", output=output, error="%x.err")
    text = Slurm().render_script(job)
    assert "#SBATCH --chdir=/data/50%j\n" in text
    assert f"#SBATCH --output={'/data/50%%j/' if output[0] != '/' else ''}{output}\n" in text
    assert "#SBATCH --error=/data/50%%j/%x.err\n" in text
    assert Slurm().log_path(replace(job, output="/data/50%%j/%j.out"), "12") == "/data/50%j/12.out"
