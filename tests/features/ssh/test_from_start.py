"""Tests of commands without a run's name, on the machine where jobs over SSH were started."""

import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import NEWEST, clean_environment, ddplaunch_command, write_program
from tests.features.ssh.job import Job
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

STOP_ALL = """
# Of the jobs on this machine only those of the test: others of this user run beside it.
import sys
from ddplaunch.cli import run_command_line
from ddplaunch.cli import locate
list_all = locate.list_running
locate.list_running = lambda: [each for each in list_all() if each.run_id in ("newest", "later")]
sys.argv[1:] = ["stop", "--all"]
sys.exit(run_command_line())
"""

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

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = servers.start(servers.network.hosts[0], command, cwd=tmp_path, env=clean_environment(state), **pipes)
        out, err = process.communicate(timeout=scaled_timeout(60))
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return run(*ddplaunch_command(*words))

    jobs = [start("n1:1,n2:1", "newest", 2)]
    try:
        done = ask("logs")
        assert (done.returncode, done.stdout) == (0, "[0] ready\n"), done.stderr
        assert done.stderr == (f"{NEWEST}: newest\nddplaunch: newest runs on n1, n2; connecting to n1 over SSH\n"), (
            done.stderr
        )
        jobs.append(start("n2:1", "later", 1))
        done = run(sys.executable, "-c", STOP_ALL)
        assert done.returncode == 0, done.stderr
        assert {"newest has ended", "later has ended"} <= {*done.stderr.splitlines()}, done.stderr
        assert [job.wait() for job in jobs] == [128 + signal.SIGINT] * 2
        done = ask("report")
        assert done.returncode == 0, done.stderr
        assert re.search("^later: stopped", done.stdout, re.MULTILINE), done.stdout
        assert ask("wait").returncode == 128 + signal.SIGINT
        jobs[0].assert_nothing_left()
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
