"""Tests of commands without a run's name, on the machine where jobs over SSH were started."""

import re
import signal
import subprocess

import pytest

from tests.conftest import NEWEST, clean_environment, ddplaunch_command, write_program
from tests.patience import scaled_timeout
from tests.ssh.job import Job
from tests.starts import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


def test_the_newest_job_of_a_folder_and_all_jobs(sshd, tmp_path):
    write_program(tmp_path, "train.py", WAITS)
    servers = sshd(3)
    for host in servers.network.hosts:  # whose /tmp is one, and with it the doors there
        host.run("mkdir", "-p", "-m", "700", "/run/user/0")
    state = {"XDG_STATE_HOME": str(tmp_path / "own")}

    def start(hosts: str, name: str, ranks: int) -> Job:
        job = Job(servers, tmp_path, "--hosts", hosts, "--run-id", name, *LIGHT, "train.py", env=state)
        job.wait_for("ready", ranks)
        return job

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = servers.start(
            servers.network.hosts[0], ddplaunch_command(*words), cwd=tmp_path, env=clean_environment(state), **pipes
        )
        out, err = process.communicate(timeout=scaled_timeout(60))
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    jobs = [start("n1:1,n2:1", "demo", 2)]
    try:
        done = ask("logs")
        assert (done.returncode, done.stdout) == (0, "[0] ready\n"), done.stderr
        assert done.stderr == (f"{NEWEST}: demo\nddplaunch: demo runs on n1, n2; connecting to n1 over SSH\n"), (
            done.stderr
        )
        jobs.append(start("n2:1", "other", 1))
        done = ask("stop", "--all")
        assert done.returncode == 0, done.stderr
        assert {"demo has ended", "other has ended"} <= {*done.stderr.splitlines()}, done.stderr
        assert [job.wait() for job in jobs] == [128 + signal.SIGINT] * 2
        done = ask("report")
        assert done.returncode == 0, done.stderr
        assert re.search("^other: stopped", done.stdout, re.MULTILINE), done.stdout
        assert ask("wait").returncode == 128 + signal.SIGINT
        jobs[0].assert_nothing_left()
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
