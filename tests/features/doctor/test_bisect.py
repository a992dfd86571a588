"""Tests of ``ddplaunch doctor bisect`` with real commands on hosts of which some are bad."""

import os
import re
import signal

import pytest

from ddplaunch.features.doctor.command_run import run_command
from tests.conftest import assert_refused, conflict, wait_until, write_program

CHECK = """
echo "on $DDPLAUNCH_HOSTS, of $1: $2 hosts, $DDPLAUNCH_NNODES"
case ",$1," in *,n3:4,*) echo "Xid 79 on n3"; exit 3;; esac
case "$1" in *n1:4*n6:4*) kill -9 $$;; esac
"""


@pytest.mark.slow
def test_a_bad_host_and_two_that_fail_together(run_in_fork, tmp_path):
    check = write_program(tmp_path, "check.sh", CHECK)
    words = ("doctor", "bisect", "--hosts", "n[0-7]:4", "--", "sh", check, "{hosts}", "{nnodes}")
    done = run_in_fork(*words, env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "--exclude=n3,n6\n")
    lines = re.sub(r" \(\d.*s\)$", "", done.stderr, flags=re.MULTILINE).splitlines()
    assert lines[:5] == [
        "ddplaunch: searching 8 hosts; a run may take 10m00s (--timeout)",
        "run 1: 8 hosts, n[0-7]: failed, exited with code 3: Xid 79 on n3",
        "run 2: 4 hosts, n[0-3]: failed, exited with code 3: Xid 79 on n3",
        "run 3: 2 hosts, n0,n1: passed",
        "run 4: 2 hosts, n2,n3: failed, exited with code 3: Xid 79 on n3",
    ]
    assert [line for line in lines if line.startswith("run 18: 2 hosts, n1,n6: failed, was ended by SIGKILL")]
    assert lines[-4:-1] == [
        "ddplaunch: n3 is bad: it failed alone, 3 times",
        "ddplaunch: n1,n6 failed together, 3 times, but pass without any one of them: check the links between them; "
        "excluding n6 is enough",
        "ddplaunch: the other 6 hosts pass together",
    ]
    folder = lines[-1].removeprefix("ddplaunch: logs of all runs: ")
    (log,) = tmp_path.glob("ddplaunch-bisect-*/run-3.log")
    assert str(log.parent) == folder
    assert log.read_text() == "on n0:4,n1:4, of n0:4,n1:4: 2 hosts, 2\n"


@pytest.mark.slow
def test_the_hosts_of_a_slurm_job_and_a_script_that_reads_them(run_in_fork, tmp_path):
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[08-11]", "TMPDIR": str(tmp_path)}
    done = run_in_fork("doctor", "bisect", "--", "sh", "-c", "case $DDPLAUNCH_HOSTS in *gpu10*) exit 1;; esac", env=env)
    assert (done.returncode, done.stdout) == (1, "--exclude=gpu10\n")
    assert "ddplaunch: the command has no {hosts}, so it must read DDPLAUNCH_HOSTS\n" in done.stderr
    assert "run 1: 4 hosts, gpu[08-11]: failed" in done.stderr
    done = run_in_fork("doctor", env={**env, "SLURM_STEP_ID": "3"})
    assert_refused(done, "Error: ddplaunch doctor starts a step on each node itself, but it already runs in a step")


@pytest.mark.slow
def test_commands_that_pass_are_skipped_or_fail_on_all_hosts(run_in_fork, tmp_path):
    def bisect(program):
        (tmp_path / "hosts").write_text("a\nb\n")
        words = ("doctor", "bisect", "--hostfile", "hosts", "--", *program, "{hosts}")
        done = run_in_fork(*words, env={"TMPDIR": str(tmp_path)})
        return done.returncode, done.stdout, done.stderr.splitlines()[-2]

    assert bisect(["true"]) == (0, "", "ddplaunch: all 2 hosts pass together")
    assert bisect(["sh", "-c", "exit 125"]) == (0, "", "ddplaunch: unknown whether all hosts pass together")
    everywhere = (
        "ddplaunch: COMMAND failed 3 times on each of: a, b; no run on as many hosts passed: check COMMAND itself"
    )
    assert bisect(["false"]) == (1, "", everywhere)
    once = ["sh", "-c", "! mkdir once"]
    assert bisect(once) == (1, "", "ddplaunch: unknown whether the other hosts pass together"), (
        "a failure is no success"
    )


SPREADS = """
case ",$1," in *,n0,*|*,n1,*) ;; *) exit 0;; esac
[ "$1" = n0 ] && exit 1
case $1 in n0,*) exit 1;; esac
trap "" TERM
touch began
setsid sh -c 'trap "" TERM; sleep 600 & sleep 600' &
sleep 600
"""


@pytest.mark.ci
def test_ctrl_c_prints_the_bad_hosts_found_so_far_and_kills_the_command(start_ddplaunch, tmp_path):
    check = write_program(tmp_path, "check.sh", SPREADS)
    job = start_ddplaunch("doctor", "bisect", "--hosts", "n[0-3]", "--", "sh", check, "{hosts}")
    wait_until((tmp_path / "began").exists, "the run that does not end")
    wait_until(lambda: len(job.find("sleep 600")) >= 3, "what it starts")
    job.signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again" in job.stderr(), "the note")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    wait_until(lambda: not job.left(), "the end of what it started")
    assert job.stdout() == "--exclude=n0\n"
    assert "ddplaunch: n0 is bad: " in job.stderr()
    assert "ddplaunch: stopped: unknown whether the other hosts pass together\n" in job.stderr()


def test_how_a_command_ends(tmp_path):
    programs = [*(["sh", "-c", line] for line in ("exit 3", "kill -9 $$", "kill -9 $PPID")), ["/dev/null"]]
    results = [run_command(words, os.environ, str(tmp_path / "log"), 60.0) for words in programs]
    assert results == [3, -9, "the process that started it was killed", "/dev/null: Permission denied"]


def test_a_run_takes_too_long(start_ddplaunch):
    hangs = ("--", "sh", "-c", "setsid sleep 600 & sleep 600")
    job = start_ddplaunch("doctor", "bisect", "--hosts", "a", "--timeout", "0.2", *hangs)
    assert job.wait() == 1
    wait_until(lambda: not job.left(), "the end of what it started")
    assert len(re.findall(r": failed, timeout after 0\.2s \(", job.stderr())) == 3


def test_a_killed_bisection_leaves_no_process(start_ddplaunch, tmp_path):
    hangs = ("--", "sh", "-c", "touch began; setsid sleep 600 & sleep 600")
    job = start_ddplaunch("doctor", "bisect", "--hosts", "a", *hangs)
    wait_until((tmp_path / "began").exists, "the run")
    job.signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not job.left(), "the end of what it started")


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("bisect --hosts a", "missing COMMAND"),
        ("bisect -- true", "missing --hosts: not inside a Slurm job"),
        ("bisect --hosts a nothere", "command not found: nothere"),
        ("--hosts a bisect true", "--hosts must come after bisect\n  ddplaunch doctor bisect --hosts n1,n2 -- COMMAND"),
        ("bisect --timeout x true", "--timeout x: expected a time up to a week, like 90 (seconds) or 10m"),
        ("bisect --host a true", "no such option: --host\n  did you mean --hosts?"),
        ("bisct", "No such command 'bisct'"),
        ("--master-addr 10.0.0.1", "--master-addr works only with several nodes\n  --hosts n1,n2"),
        ("--exclude n1", "--exclude works only with --hosts or --hostfile\n  --hosts n1,n2"),
        ("--node-rank 1", "--node-rank 1 requires --nnodes\n  add the number of nodes: --nnodes 2"),
        ("--nnodes 2 --master-addr n0",
         "--nnodes 2 requires --node-rank\n  on node 0: --nnodes 2 --node-rank 0 --master-addr n0"),
        ("--nnodes 2 --node-rank 0",
         "--nnodes 2 requires --master-addr\n  on node 0: --nnodes 2 --node-rank 0 --master-addr 10.0.0.1"),
        ("--nnodes 2 --node-rank 2 --master-addr n0",
         "--node-rank 2 is out of range: 2 nodes are numbered 0 to 1\n  --nnodes 3 or more, if that was the intention"),
        ("--nnodes 1 --node-rank 1", "--node-rank 1 is out of range: the one node is 0\n  --nnodes 2 or more, if"),
        ("--nnodes 2 --hostfile h", f"{conflict('--nnodes 2', '--hostfile')}, which sets the number\n"),
        ("--nnodes 2 --node-rank 0 --hosts n0,n1",
         f"{conflict('--nnodes 2', '--hosts')}, which sets the number\n  leave one of them out"),
    ],
)  # fmt: skip
def test_refusals(run_in_fork, line, refusal):
    assert_refused(run_in_fork("doctor", *line.split()), f"Error: {refusal}")
