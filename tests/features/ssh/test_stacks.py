"""Tests of Ctrl-\\ in the terminal of a job over SSH: the stacks of ranks on all hosts."""

import os
import pty
import select
import signal
import time

import pytest

from tests.conftest import write_program
from tests.features.ssh.job import Job
from tests.scaled_timeouts import scaled_timeout

pytestmark = [pytest.mark.ci, pytest.mark.slow]

HANGS = """
    import time, torch, torch.distributed as dist

    def load_batch():
        time.sleep(600)

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(6))
    print("there", flush=True)
    if dist.get_rank() == 3:
        load_batch()
    dist.all_reduce(torch.ones(6))
"""


def read_until(ours: int, text: str) -> str:
    """Read from a terminal until a text has come; return all that has."""
    seen = b""
    deadline = time.monotonic() + scaled_timeout(60)
    while text not in seen.decode(errors="replace"):
        assert time.monotonic() < deadline, seen
        if select.select([ours], [], [], 0.05)[0]:
            seen += os.read(ours, 1 << 16)
    return seen.decode(errors="replace").replace("\r\n", "\n")


def test_ctrl_backslash_shows_all_hosts_and_twice_stops(sshd, tmp_path):
    write_program(tmp_path, "train.py", HANGS)
    ours, theirs = pty.openpty()
    job = Job(sshd(2), tmp_path, "--hosts", "n0:2,n1:2", "train.py", terminal=theirs)
    os.close(theirs)
    try:
        job.wait_for("there", 4)
        job.process.send_signal(signal.SIGQUIT)
        page = read_until(ours, "(wait in all_reduce #2")
        assert "inspecting the ranks" in page
        assert "rank 3 has not entered it: load_batch at train.py:4" in page
        assert "ranks 0 to 2 wait in all_reduce #2 of default_pg (float32[6])" in page
        job.process.send_signal(signal.SIGQUIT)
        job.process.send_signal(signal.SIGQUIT)
        assert job.wait() == 128 + signal.SIGQUIT
        job.assert_nothing_left()
    finally:
        job.process.kill()
        job.process.wait()
        os.close(ours)
