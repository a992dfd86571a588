"""Tests that a new scheduler needs a file and a line of ``feature.py``, in a copy of the package."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import run_command, write_program
from tests.package_copy import START, copy_package

TOY = '''
"""Toy: a scheduler with one queue and one host."""

from msgspec.structs import asdict

from ddplaunch.features.submit.batch_scheduler import BatchScheduler
from ddplaunch.system.schedulers.scheduler import JobId, BatchJobState, ended_state


class Toy(BatchScheduler):
    """Toy, by toyq, which prints a job and its state in each line."""

    title, submit_program, query_program, cancel_program, list_command = "Toy", "toysub", "toyq", "toykill", "toyq"
    history_hint = "nothing does"

    def render_script(self, job):
        return f"#!/bin/sh\\n#TOY nodes={job.nodes}\\nexec ddplaunch run {' '.join(job.command)}\\n"

    def log_name(self, job):
        return "toy.out"

    def log_path(self, job, number):
        return f"{job.chdir}/toy.out"

    def rejection_hint(self, error):
        return "toyq lists the jobs"

    def parse_job_id(self, job, answer):
        return JobId(answer)

    def query_records(self, jobs, deadline):
        found = []
        for line in deadline.run("toyq").stdout.splitlines():
            number, state = line.split()
            record = ended_state(143, "was killed")
            if state == "running":
                record = BatchJobState("is running", is_running=True)
            found.append(BatchJobState(**{**asdict(record), "job": JobId(number), "number": number}))
        return found
'''

LINE = '        SchedulerEntry("toy", "Toy", "toy", "Toy"),\n'

PROGRAMS = {
    "toysub": "cat >script; echo 7 running >jobs; echo 7",
    "toyq": "cat jobs",
    "toykill": 'echo "$1 killed" >jobs',
}


@pytest.fixture
def toy(tmp_path: Path):
    """Type a command of a ddplaunch that has the scheduler, where the scheduler's programs are."""
    package = copy_package(tmp_path)
    (package / "features" / "submit" / "toy.py").write_text(TOY)
    table = package / "features" / "submit" / "feature.py"
    table.write_text(table.read_text().replace('        SchedulerEntry("lsf"', f'{LINE}        SchedulerEntry("lsf"'))
    for name, line in PROGRAMS.items():
        write_program(tmp_path, f"bin/{name}", f"#!/bin/sh\n{line}\n").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    env = {"PYTHONPATH": str(tmp_path), "PATH": path, "XDG_STATE_HOME": f"{tmp_path}/state"}
    return lambda *words: run_command([sys.executable, "-c", START, *words], tmp_path, env)


@pytest.mark.slow
def test_its_jobs_are_submitted_shown_and_stopped(toy, tmp_path):
    words = ("submit", "--scheduler", "toy", "--nodes", "2", "--grace", "5", "train.py")
    dry = toy("submit", "--dry-run", *words[1:])
    assert dry.stdout == "#!/bin/sh\n#TOY nodes=2\nexec ddplaunch run --grace 5 train.py\n", dry.stderr
    assert "nodes: 2 (--nodes)" in dry.stderr
    assert toy(*words).stdout.splitlines()[0] == "job 7: train.py on 2 nodes"
    assert (tmp_path / "script").read_text() == dry.stdout
    assert re.search(r"(?m)^7 .* train.py +running$", toy("ps").stdout)
    refused = toy("stacks", "7")
    assert "nodes of job 7: Toy " in refused.stderr
    assert ": Toy decides when to kill the ranks" in toy("stop", "7", "--now").stderr
    assert toy("stop", "7").stderr == "stopping job 7\njob 7 was killed (exit code 143)\n"
    assert toy("attach", "7").returncode == 143
