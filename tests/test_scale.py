"""Tests of the scale benchmark: it runs without errors; times are not checked."""

import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.base.connection import Connection
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import encode
from ddplaunch.core.messages import NoteMessage, StartAttempt
from tests.conftest import clean_environment
from tests.core.job.job_steps import Job
from tests.tools.benchmarks import scale


@pytest.mark.ci
@pytest.mark.slow
def test_few_nodes():
    run = subprocess.run(
        [sys.executable, "-m", "tests.tools.benchmarks.scale", "--nodes", "4", "--played", "16", "--rest", "1"],
        cwd=Path(__file__).parents[1],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "| nodes | 4 | grows as |" in run.stdout
    assert "| nodes | 16 | grows as |" in run.stdout
    assert "| connections that node 0 dropped | 0 | – |" in run.stdout


def test_orders_to_start_are_short():
    """1,000 nodes of eight ranks: each learns its own place, in words that are no longer for more nodes."""
    job = Job(min_nodes=1000)
    for number in range(1, 1000):
        hello = job.hello(number)
        job.admit(replace(hello, node_spec=replace(hello.node_spec, devices=("cuda:0",) * 8)))
    starts = [message for number, message in job.sent if isinstance(message, StartAttempt) and number]
    assert len(starts) == 999
    assert [start.assignment.first_rank for start in starts] == [2 + 8 * number for number in range(999)]
    assert max(len(encode(start)) for start in starts) < 200


def test_what_goes_to_all_is_in_memory_once():
    """Ten peers read nothing of a frame of 8 MB."""
    loop, frame, ends = EventLoop(), encode(NoteMessage("x" * (8 << 20))), []
    peers = []
    for _ in range(10):
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        peers.append(Connection(loop, ours, [NoteMessage], lambda message: None, lambda why: None))
    tracemalloc.start()
    for peer in peers:
        peer.send_frame(frame)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(peer.unsent_bytes > 4 << 20 for peer in peers)
    assert most < 8 << 20
    for peer in peers:
        peer.close()
    for end in ends:
        end.close()


def test_the_exponent_of_a_power_law_is_fitted():
    assert scale.fit_exponent([(n, 5 * n**2) for n in (4, 16, 64)]) == pytest.approx(2)
    assert scale.fit_exponent([(4, 0.0), (16, 1.0)]) is None
