"""Tests of ``--services``: a job that uses the programs of another one, which goes on after it."""

import re
import sys

import pytest

from tests.conftest import PROGRAMS, wait_until, write_program
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

SERVER = ("--command", "--name", "vllm", "--ready", "http:/health", "--count", "2", sys.executable,
          PROGRAMS / "server.py", "{port}")  # fmt: skip
SHOWS = (
    "import os, sys\nprint(*sys.argv[1:], os.environ['DDPLAUNCH_VLLM_ADDRESS'], os.environ['DDPLAUNCH_VLLM_ADDRESSES'])"
)


@pytest.fixture
def services(start_ddplaunch):
    """Start a job that has only services, and an idle rank."""
    jobs = []

    def start(*how, name="shared"):
        jobs.append(start_ddplaunch("run", *SERVER, *how, ":", "--run-id", name, "--no-python", "sleep", "1000"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.terminate()
        job.wait()
        job.assert_nothing_left()


def addresses(job):
    """The addresses of its two servers, once they are ready."""
    wait_until(lambda: job.stderr().count("is ready at") == 2, f"the servers: {job.stderr()}")
    return [re.search(rf"vllm\.{index} is ready at (\S+)", job.stderr())[1] for index in range(2)]


@pytest.mark.ci
def test_a_job_waits_for_the_services_of_another_one_which_go_on(services, start_ddplaunch, run_ddplaunch, tmp_path):
    write_program(tmp_path, "shows.py", SHOWS)
    shared = services("late=1")
    wait_until(lambda: "waiting for vllm" in shared.stderr(), "the servers")
    words = ("--nproc", "1", *EXEC, "shows.py", "http://{vllm}/v1", "{vllm.all}", "--services", "x")
    job = start_ddplaunch("run", "--services", "shared", *words)
    assert job.wait() == 0, job.stderr()
    first, second = addresses(shared)
    both = f"{first},{second}"
    assert job.stdout() == f"http://{first}/v1 {both} --services x {first} {both}\n"
    asks = ("sh", "-c", f"exec {sys.executable} {PROGRAMS / 'client.py'} http://$DDPLAUNCH_VLLM_ADDRESS/x once")
    main = ("--command", "--name", "orch", "--kind", "main", "--env", "RANK=0", *asks)
    done = run_ddplaunch("run", *main, ":", "--services=shared", "--nproc", "1", "--no-python", "echo", "{vllm}")
    assert (done.returncode, done.stdout) == (0, f"{first}\n")
    assert f"[orch] rank 0 got ok from http://{first}/x" in done.stderr
    assert shared.process.poll() is None


@pytest.mark.ci
def test_what_cannot_be_used(services, run_ddplaunch, run_in_fork, start_ddplaunch, tmp_path):
    write_program(tmp_path, "shows.py", SHOWS)
    done = run_in_fork("run", "--services", "nosuch", "shows.py")
    assert (done.returncode, done.stdout) == (2, "")
    shared = services()
    addresses(shared)
    done = run_ddplaunch("run", "--services", "shared", *EXEC, "shows.py", "{vllm.port.x}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "{vllm.port.x}: vllm of shared has no such port\n  it has {vllm.port}\n" in done.stderr
    other = start_ddplaunch("run", "--run-id", "plain", "--no-python", "sleep", "1000")
    wait_until(lambda: len(other.find("sleep 1000")) > 1, "the rank")
    done = run_ddplaunch("run", "--services", "plain", *EXEC, "shows.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--services plain: that run has no other programs" in done.stderr
    other.process.terminate()
    other.wait()
