"""Tests of further targets, each with ranks and a store of its own, and of jobs with several mains."""

import re
import signal

import pytest

from tests.conftest import PROGRAMS, free_port, wait_until, write_program
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

MEETS = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", os.environ["RANK"], "of", int(total), *sys.argv[1:], flush=True)
while "waits" in sys.argv:
    time.sleep(0.1)
"""

WORLDS = """
[programs.teacher]
target = "--nproc 2 teacher.py {port.group} waits"
kind = "service"
ready = "line:rank 0 of 2"

[programs.student]
target = "--nproc 2 student.py {teacher.host}:{teacher.port.group}"
"""


@pytest.fixture
def begin(start_ddplaunch, tmp_path):
    """Start a job of a file; nothing is left of it at the end of the test."""
    jobs = []

    def start(text, *words, **options):
        (tmp_path / "job.toml").write_text(text)
        jobs.append(start_ddplaunch("run", *words, "job.toml", **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.wait()
        job.assert_nothing_left()


@pytest.mark.ci
def test_two_process_groups(begin, tmp_path):
    write_program(tmp_path, "teacher.py", MEETS)
    write_program(tmp_path, "student.py", MEETS)
    job = begin(WORLDS)
    assert job.wait() == 0, job.stderr()
    address = re.search(r"\[0\] rank 0 of 2 (127\.0\.0\.1:\d+)", job.stdout())[1]
    assert f"[1] rank 1 of 2 {address}" in job.stdout()
    for rank in (0, 1):
        assert f"[teacher] [{rank}] rank {rank} of 2 {address.partition(':')[2]} waits" in job.stderr()
    assert "[teacher] ddplaunch: SIGTERM: stopping 2 ranks" in job.stderr()


@pytest.mark.ci
def test_a_world_on_two_nodes_of_its_own(start_ddplaunch, tmp_path):
    for name in ("teacher.py", "student.py"):
        write_program(tmp_path, name, MEETS)
    text = WORLDS.replace("--nproc 2", "--nproc 1").replace('kind = "service"', 'kind = "service"\nnodes = 2')
    (tmp_path / "job.toml").write_text(text)
    port = str(free_port())
    where = ("--nnodes", "4", "--master-addr", "127.0.0.1", "--master-port", port)
    jobs = [start_ddplaunch("run", *where, "--node-rank", node, "job.toml") for node in range(4)]
    assert [job.wait() for job in jobs] == [0] * 4, jobs[2].stderr()
    assert "rank 0 of 2 127.0.0.1:" in jobs[0].stdout()
    for rank in (0, 1):
        assert re.search(rf"\[teacher\.{rank}\] (\[{rank}\] )?rank {rank} of 2 \d+ waits", jobs[2 + rank].stderr())
    for job in jobs:
        job.assert_nothing_left()


STUDENT = f"""
[programs.student]
target = "--nproc 2 {" ".join(EXEC)} {PROGRAMS / "client.py"} http://{{vllm}}/x"
"""
TEACHER = f"""
[programs.vllm]
target = "--nproc 1 {" ".join(EXEC)} {PROGRAMS / "server.py"} {{port}} HOW"
kind = "service"
ready = "http:/health"
"""


@pytest.mark.ci
def test_a_failure_in_either_ends_both_with_its_code(begin, tmp_path):
    job = begin(TEACHER.replace("HOW", "exit=5") + STUDENT)
    job.wait_for("got ok", 2)
    (tmp_path / "end").touch()
    assert job.wait() == 5
    assert "ddplaunch: vllm exited with code 5 before student was done (exit code 5)" in job.stderr()
    assert "[vllm] ddplaunch: rank 0 exited with code 5" in job.stderr()
    (tmp_path / "end").unlink()
    (tmp_path / "go").touch()
    job = begin(TEACHER.replace("HOW", "") + STUDENT.replace("/x", "/x exit=3"))
    assert job.wait() == 3
    assert "rank 1 exited with code 3" in job.stderr()


def test_kill_9_of_the_launcher_ends_both(begin):
    job = begin(TEACHER.replace("HOW", "children") + STUDENT)
    job.wait_for("got ok", 2)
    job.signal(signal.SIGKILL)
    assert job.wait() == -9


@pytest.mark.ci
@pytest.mark.parametrize("code", [0, 4])
def test_the_job_waits_for_all_mains(begin, tmp_path, code):
    """The first target that is a main has the ranks of the job; another main is a further world."""
    write_program(tmp_path, "other.py", f"""
        import os, sys, time
        while not os.path.exists("end"):
            time.sleep(0.02)
        sys.exit({code})
        """)  # fmt: skip
    (tmp_path / "go").touch()
    other = f"""
[programs.other]
target = "--nproc 1 {" ".join(EXEC)} other.py"
"""
    job = begin(TEACHER.replace("HOW", "") + STUDENT + other)
    job.wait_for("got ok", 2)
    wait_until(lambda: {*job.find("client.py")} <= {job.process.pid}, "the end of the ranks")
    (tmp_path / "end").touch()
    assert job.wait() == code
    assert ("other exited with code 4 (exit code 4)" in job.stderr()) is bool(code)


MAIN = """
[programs.orch]
command = "COMMAND"
kind = "main"
"""


@pytest.mark.ci
def test_a_main_that_runs_much_longer_than_the_ranks(begin, tmp_path):
    (tmp_path / "go").touch()
    job = begin(MAIN.replace("COMMAND", "sleep 1000") + TEACHER.replace("HOW", "") + STUDENT, "--mains-timeout", "1")
    assert job.wait() == 124
    assert "ddplaunch: orch still ran 1.0s after student was done (exit code 124)" in job.stderr()


@pytest.mark.ci
def test_ranks_that_run_much_longer_than_a_main(begin):
    job = begin(MAIN.replace("COMMAND", "true") + TEACHER.replace("HOW", "") + STUDENT, "--mains-timeout", "1")
    assert job.wait() == 124
    assert "ddplaunch: student still ran 1.0s after orch was done: stopping the ranks" in job.stderr()
    assert "  meanwhile: " in job.stderr()


def test_a_limit_for_mains_needs_several_programs(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--mains-timeout", "60", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--mains-timeout 60 works only with several programs\n  --timeout limits the whole job" in done.stderr
