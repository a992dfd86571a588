"""Tests of docs/examples/elastic.py: each sample is seen once an epoch, and the loss is the same, after any fault."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import BackgroundJob, clean_environment, free_port, wait_until, write_program
from tests.examples.plain import EXAMPLES, ONE_THREAD, run_by_python
from tests.scaled_timeouts import scaled_timeout

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(300)]

ELASTIC = EXAMPLES / "elastic.py"
EPOCHS, SAMPLES = 5, 960

START = re.compile(r"start: epoch (\d+), sample (\d+) of \d+, (\d+) ranks")

WATCHED = f"""
import json, os, sys, time
from pathlib import Path

sys.path.insert(0, {str(ELASTIC.parent)!r})
import elastic
import torch.distributed as dist

attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
hold = json.loads(os.environ.get("HOLD", "{{}}")).get(attempt)

class Watched(elastic.ElasticSampler):
    def __iter__(self):
        start = self.consumed
        with open(f"consumed.{{dist.get_rank()}}", "a", buffering=1) as log:
            for share in super().__iter__():
                if [self.epoch, start] == hold and dist.get_rank() == 0:
                    print(f"attempt {{attempt}} is held", flush=True)
                    while not elastic.stop_signals:
                        time.sleep(0.01)
                print(attempt, self.epoch, start, *share, file=log)
                yield share
                start += elastic.BATCH

elastic.ElasticSampler = Watched
elastic.main(Path("elastic.pt"), epochs={EPOCHS})
"""
"""The example, which logs the samples that each rank takes, and stands still where HOLD says until it gets SIGTERM."""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_program(tmp_path, "watched.py", WATCHED)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss at the end of a run by plain python."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return final_loss(run_by_python(folder, ELASTIC, "--checkpoint", "elastic.pt", "--epochs", str(EPOCHS)))


def final_loss(output: str) -> float:
    (loss,) = re.findall(r"finished: loss ([\d.]+)", output)
    return float(loss)


def check_trained(output: str, folder: Path, undisturbed: float) -> list[tuple[int, int, int]]:
    """What counts was consumed once, the loss is that of an undisturbed run; return each attempt's ranks and start."""
    assert final_loss(output) == pytest.approx(undisturbed, rel=1e-3)
    began = [tuple(map(int, found)) for found in START.findall(output)]
    ends = [position for *position, _ in began[1:]] + [[EPOCHS + 1, 0]]
    consumed = {epoch: Counter[int]() for epoch in range(1, EPOCHS + 1)}
    for log in folder.glob("consumed.*"):
        for line in log.read_text().splitlines():
            attempt, epoch, start, *share = map(int, line.split())
            if [epoch, start] < ends[attempt]:  # else it was lost, and done again
                consumed[epoch].update(share)
    assert all(each == Counter(range(SAMPLES)) for each in consumed.values())
    return [(ranks, epoch, start) for epoch, start, ranks in began]


@pytest.fixture
def start_node(start_ddplaunch, program):
    """Start the launcher of a node, all of them on this machine; with what it says if a test fails."""
    port = str(free_port())
    where = ("--master-addr", "127.0.0.1", "--master-port", port, "--nproc", "1")
    limits = ("--heartbeat-timeout", "2", "--grace", "2", "--join-window", "100")

    def start(node_rank: int, *options: str, hold: object = None) -> BackgroundJob:
        words = (*limits, *options, program, "--node-rank", str(node_rank), *where)
        return start_ddplaunch("run", *words, env={**ONE_THREAD, "HOLD": json.dumps(hold or {})})

    return start


def kill_node(node: BackgroundJob) -> None:
    """Kill a launcher and stop its rank: until that is killed too, it would go on training with the others."""
    os.kill(node.ranks()[0], signal.SIGSTOP)
    node.process.kill()


def test_a_lost_node_joins_again_at_once_with_grow(start_node, tmp_path, undisturbed):
    hold, options = {"0": [2, 360], "1": [3, 120]}, ("--nnodes", "2:3", "--grow")
    nodes = [start_node(node_rank, *options, hold=hold) for node_rank in range(3)]
    nodes[0].wait_for("attempt 0 is held")
    kill_node(nodes[2])
    nodes[0].wait_for("attempt 1 is held")
    nodes[2] = start_node(2, *options, hold=hold)
    assert [node.wait() for node in nodes] == [0, 0, 0], nodes[0].stderr()
    attempts = check_trained(nodes[0].stdout(), tmp_path, undisturbed)
    # The checkpoint is that of 10 steps before or less; before growing, all write one.
    assert attempts[:2] == [(3, 1, 0), (2, 2, 240)]
    assert [ranks for ranks, _, _ in attempts] == [3, 2, 3]
    assert attempts[2][1:] >= (3, 144)


def test_without_grow_a_node_waits_for_the_next_restart(start_node, tmp_path, undisturbed):
    hold, options = {"0": [2, 360], "1": [3, 120]}, ("--nnodes", "1:2", "--max-restarts", "1")
    nodes = [start_node(node_rank, *options, hold=hold) for node_rank in range(2)]
    nodes[0].wait_for("attempt 0 is held")
    kill_node(nodes[1])
    nodes[0].wait_for("attempt 1 is held")
    nodes[1] = start_node(1, *options, hold=hold)
    wait_until(lambda: "has joined; it takes part" in nodes[0].stderr(), "the node that waits")
    os.kill(nodes[0].ranks()[0], signal.SIGKILL)
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].stderr()
    attempts = check_trained(nodes[0].stdout(), tmp_path, undisturbed)
    assert attempts == [(2, 1, 0), (1, 2, 240), (2, 2, 960)]


def test_a_killed_rank_on_one_node(start_ddplaunch, program, tmp_path, undisturbed):
    hold = json.dumps({"0": [2, 360]})
    job = start_ddplaunch("run", "--max-restarts", "1", program, "--nproc", "2", env={**ONE_THREAD, "HOLD": hold})
    job.wait_for("attempt 0 is held")
    os.kill(max(job.ranks()), signal.SIGKILL)
    assert job.wait() == 0, job.stderr()
    assert check_trained(job.stdout(), tmp_path, undisturbed) == [(2, 1, 0), (2, 2, 240)]


def test_plain_python_stops_on_sigterm_and_resumes_with_the_next_step(program, tmp_path, undisturbed):
    words, environment = [sys.executable, str(program)], clean_environment({**ONE_THREAD, "PYTHONUNBUFFERED": "1"})
    hold = {"HOLD": json.dumps({"0": [2, 360]})}
    with subprocess.Popen(
        words, cwd=tmp_path, env={**environment, **hold}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = ""
        while "is held" not in first:
            line = process.stdout.readline()
            assert line, first
            first += line
        process.send_signal(signal.SIGTERM)
        first += process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "saved: epoch 2, sample 384 of 960" in first
    again = {**environment, "TORCHELASTIC_RESTART_COUNT": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=again, capture_output=True, text=True, timeout=scaled_timeout(60))
    attempts = check_trained(first + done.stdout, tmp_path, undisturbed)
    assert attempts == [(1, 1, 0), (1, 2, 384)]
