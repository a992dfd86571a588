"""Tests of stalled jobs: the culprit is reported, or the job stopped, and a slow job is left alone."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from ddplaunch.observe.history import history_store
from tests.conftest import PROGRAMS, free_port, is_alive, wait_until, wait_until_idle, write_program
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "stalls.py"
SOON = ("--stall-timeout", "2", "--grace", "5")
REPORT = (*SOON, "--on-stall", "report")


@pytest.fixture
def elsewhere():
    """The port of a server outside the job, which sends nothing; the kernel takes what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


CULPRITS = {
    "stop": r"rank 2 was stopped \(SIGSTOP\) and did not enter all_reduce #2, which 2 ranks waited for",
    "absent": r"rank 2 did not call init_process_group, which 2 ranks waited for: sleep at .*stalls.py:\d+",
    "old": r"rank 2 did not call all_reduce, which 2 ranks waited for: sleep at .*stalls.py:\d+",
    "idle": r"all ranks are idle: ranks 0 to 2: sleep at .*stalls.py:\d+",
    "recv": r"ranks 0 to 2 waited for each other, 0 → 1 → 2 → 0: ranks 0 to 2 in recv",
    "reply": r"rank 2 .* 2 ranks waited for: it waits for a reply from 127.0.0.1:\d+, reply at .*stalls.py:\d+",
    "sleep": r"rank 2 did not enter all_reduce #2, which 2 ranks waited for: sleep at .*stalls.py:\d+",
}


@pytest.mark.ci
def test_each_stalled_attempt_is_stopped_and_its_culprit_reported(run_ddplaunch, tmp_path, elsewhere):
    """The job stalls in another way in each attempt, until no restart is left."""
    restarts = len(CULPRITS) - 1
    options = ("--on-stall", "restart", "--max-restarts", str(restarts), "--restart-on", "always", "--min-uptime", "0")
    words = (*SOON, *options, "--log-dir", "logs", "--nproc", "3", PROGRAM, ",".join(CULPRITS), elsewhere)
    done = run_ddplaunch("run", *words)
    assert done.returncode == 124, done.stderr
    reports = re.findall(r"ddplaunch: no progress for \d+\.\ds \(--stall-timeout\): (.*)", done.stderr)
    for report, expected in zip(reports[:restarts], CULPRITS.values(), strict=False):
        assert re.fullmatch(expected, report), done.stderr
    assert re.fullmatch(CULPRITS["sleep"], reports[-1]), done.stderr
    assert f"ddplaunch: restart {restarts} of {restarts}\n" in done.stderr
    assert "2 other ranks were stopped" in done.stderr
    assert not re.search(r"^Traceback", done.stderr, re.MULTILINE), "ranks that are stopped print some"
    hint = "  if the ranks were busy, raise --stall-timeout or call ddplaunch.runtime.working()\n"
    assert hint in done.stderr
    assert 'stalls.py", line' in done.stderr
    (failure,) = tmp_path.glob("logs/*/failure.json")
    assert json.loads(failure.read_text())["first"]["rank"] == 2
    assert [*tmp_path.rglob("stacks*.json")]


@pytest.mark.ci
@pytest.mark.parametrize(
    "side_by_side",
    [["validate"], ["build"], ["store"], ["save", "chat", "steps", "torchless"], ["upload", "poll"]],
    ids=" ".join,
)
def test_a_slow_job_is_left_alone(start_ddplaunch, elsewhere, side_by_side):
    words = ("run", *SOON, "--show", "none", "--nproc", "3", PROGRAM)
    jobs = {what: start_ddplaunch(*words, what, elsewhere) for what in side_by_side}
    assert {what: (job.wait(), job.stderr()) for what, job in jobs.items()} == dict.fromkeys(side_by_side, (0, ""))


@pytest.mark.ci
@pytest.mark.usefixtures("state")
def test_a_stall_is_reported_once_without_stopping(start_ddplaunch, run_in_fork, tmp_path):
    """It is reported again when ranks have moved and stall again, also to --notify; stalled time is not effective."""
    options = ("--notify", "sh -c 'cat >> events'", "--metrics", "job.prom")
    job = start_ddplaunch("run", *REPORT, *options, "--nproc", "3", PROGRAM, "stop")
    expected = (
        r"ddplaunch: no progress for \d\.\ds: ranks 0, 1 wait in all_reduce #2 .*; rank 2 is stopped \(SIGSTOP\); "
    )
    wait_until(job.stderr, "a report of the stall")
    assert re.fullmatch(expected + r"for details: ddplaunch stacks \S+\n", job.stderr()), job.stderr()
    time.sleep(2.5)  # the thing tested is that nothing more is reported
    assert job.stderr().count("\n") == 1
    stopped = [pid for pid in job.ranks() if is_alive(pid) and "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()]
    assert re.match(r"goodput \d+ %: .* stalled", run_in_fork("report", str(job.process.pid)).stdout), "while it lasts"
    resumed_at = time.time()
    os.kill(stopped[0], signal.SIGCONT)
    assert job.wait() == 0
    job.assert_nothing_left()
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [each["event"] for each in events] == ["starts", "stalls", "ends"]
    assert events[0]["time"] < events[1]["since"] < events[1]["time"] - 1.5
    assert "rank 2 is stopped (SIGSTOP)" in events[1]["text"]
    assert re.search(r"^ddplaunch_stalls_total\{.*\} 1$", (tmp_path / "job.prom").read_text(), re.MULTILINE)
    (found,) = history_store.read_all_records()
    assert resumed_at - events[1]["since"] <= found.spent.stalled <= found.ended - events[1]["since"]
    assert found.spent.wall_s == pytest.approx(found.ended - found.began, abs=1e-3)


def test_a_job_of_one_rank_has_no_stall_detection(run_ddplaunch, tmp_path):
    done = run_ddplaunch(
        "run", *LIGHT, "--stall-timeout", "60", "--nproc", "1", write_program(tmp_path, "t.py", "print('done')")
    )
    expected = "ddplaunch: --stall-timeout has no effect in a job of one rank\n"
    assert (done.returncode, done.stderr) == (0, expected)


@pytest.mark.ci
def test_a_culprit_on_another_node_is_reported(start_ddplaunch):
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = ("run", *SOON, "--nnodes", "2", *address)
    job = start_ddplaunch(*words, "--node-rank", "0", "--nproc", "2", PROGRAM, "sleep")
    other = start_ddplaunch(*words, "--node-rank", "1", "--nproc", "1", PROGRAM, "sleep")
    assert (job.wait(), other.wait()) == (124, 124)
    blame = r"rank 2 did not enter all_reduce #2, which 2 ranks waited for: sleep at .*stalls.py:\d+ \(on \S+\)\n"
    assert re.search(blame, job.stderr()), job.stderr()
    for node in (job, other):
        node.assert_nothing_left()


@pytest.mark.ci
def test_the_launcher_sleeps_while_ranks_wait(start_ddplaunch):
    """The launcher sleeps until its timer expires; then it reports which ranks wait, and the job continues."""
    job = start_ddplaunch("run", "--nproc", "3", PROGRAM, "sleep")
    job.wait_for("started", 3)
    wait_until_idle(job.process.pid, seconds=3)
    wait_until(job.stderr, "a report of the stall")
    expected = (
        r"ddplaunch: no progress for \d\ds: ranks 0, 1 wait in all_reduce #2 .*; rank 2 has not entered it: sleep at "
    )
    assert re.match(expected, job.stderr())
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_nothing_left()
