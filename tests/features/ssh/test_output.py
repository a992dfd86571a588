"""Tests of the output of ranks over SSH, also with a slow reader."""

import re
import select
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import write_program
from tests.features.ssh.job import LAUNCHER, Job, refusal
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

PRINTS = """
import os
import sys

for number in range(int(sys.argv[1])):
    print(os.environ["RANK"], number, "x" * 1000)
print("the end")
"""


def peak(pid: int) -> int:
    """The most memory that a process has had so far, in MiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024


def test_a_slow_terminal_loses_nothing_and_costs_no_memory(sshd, tmp_path):
    """A terminal that reads slowly for longer than the timeouts gets all output, and memory does not grow."""
    count = 40_000  # lines of a KiB from each of two ranks
    write_program(tmp_path, "train.py", PRINTS)
    words = ("--hosts", "n1:1,n2:1", "--heartbeat-timeout", "3", "--grace", "2", *LIGHT, "train.py", str(count))
    run = Job(sshd(3), tmp_path, *words, pipe=True)
    pipe = run.process.stdout
    began, output = time.monotonic(), [pipe.read1(4096)]
    while time.monotonic() - began < 11:
        output.append(pipe.read1(4096))
        select.select([], [], [], 0.3)  # how slow the terminal is
    launchers = [pid for host in run.hosts[1:] for pid in host.find(LAUNCHER)]
    assert len(launchers) == 2
    for pid in (run.process.pid, *launchers):
        assert peak(pid) < 100
    while piece := pipe.read1(1 << 20):
        output.append(piece)
    assert run.wait() == 0, run.stderr()
    lines = b"".join(output).decode().splitlines()
    for rank in (0, 1):
        own = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}]")]
        assert own == [*(f"{rank} {number} {'x' * 1000}" for number in range(count)), "the end"]
    run.assert_nothing_left()


def test_a_slow_link_is_not_taken_for_a_lost_host(sshd, tmp_path):
    """A host that fills its link of 2 Mbit/s for four times the heartbeat timeout is not lost."""
    write_program(tmp_path, "train.py", PRINTS)
    servers = sshd(3)
    shape = ("rate", "2mbit", "burst", "16kb", "latency", "400ms")
    servers.network.hosts[1].run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)
    words = ("--hosts", "n1:1,n2:1", "--heartbeat-timeout", "2", "--grace", "2", *LIGHT, "train.py", "2000")
    run = Job(servers, tmp_path, *words)
    assert run.wait(120) == 0, run.stderr()
    for rank in (0, 1):
        own = [line for line in run.stdout().splitlines() if line.startswith(f"[{rank}]")]
        assert own == [*(f"[{rank}] {rank} {number} {'x' * 1000}" for number in range(2000)), f"[{rank}] the end"]


def test_ctrl_c_ends_a_job_whose_output_is_not_read(sshd, tmp_path):
    write_program(tmp_path, "train.py", PRINTS)
    run = Job(sshd(2), tmp_path, "--hosts", "n1:2", "--grace", "2", *LIGHT, "train.py", "40000", pipe=True)
    assert run.process.stdout.read1(10)
    run.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + scaled_timeout(60)
    while run.process.poll() is None and time.monotonic() < deadline:
        select.select([], [], [], 0.5)
        run.process.send_signal(signal.SIGINT)
    assert run.process.returncode == 130, run.stderr()
    run.assert_nothing_left()


@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "folders of their own"])
def test_each_host_keeps_the_log_of_its_ranks(sshd, tmp_path, shared):
    write_program(tmp_path, "train.py", "import os\nprint('rank', os.environ['RANK'])\n")
    servers = sshd(3)
    there = servers.network.hosts[2]
    (tmp_path / "logs").mkdir()
    if not shared:
        there.run("mount", "-t", "tmpfs", "none", tmp_path / "logs")
    run = Job(servers, tmp_path, "--hosts", "n1:1,n2:1", "--log-dir", "logs", "--run-id", "a", *LIGHT, "train.py")
    assert run.wait() == 0, run.stderr()
    assert "ddplaunch: log folder: logs/a/node-0 on n1\n" in run.stderr()
    assert "ddplaunch: log folder: logs/a/node-1 on n2\n" in run.stderr()
    assert (tmp_path / "logs/a/node-0/rank-0.log").read_text() == "rank 0\n"
    assert there.run("cat", tmp_path / "logs/a/node-1/rank-1.log") == "rank 1\n"
    assert (tmp_path / "logs/a/node-1").exists() == shared


def test_a_host_that_can_keep_no_log(sshd, tmp_path):
    write_program(tmp_path, "train.py", "")
    write_program(tmp_path, "file", "")
    servers = sshd(3)
    (tmp_path / "logs").mkdir()
    servers.network.hosts[2].run("mount", "-t", "tmpfs", "-o", "ro", "none", tmp_path / "logs")
    run = Job(servers, tmp_path, "--hosts", "n1:1,n2:1", "--log-dir", "logs/ours", "train.py")
    assert run.wait() == 2
    assert run.stderr().splitlines() == [refusal(1, 2), f"  n2  --log-dir logs/ours: cannot write to {tmp_path}/logs"]
    again = Job(servers, tmp_path, "--hosts", "n1", "--log-dir", "file/logs", "train.py")
    assert again.wait() == 2
    assert f"  n1  --log-dir file/logs: {tmp_path}/file is not a folder\n" in again.stderr()


FORGES = """
import os
import sys

for stream in (sys.stdout, sys.stderr):
    print("\\x1eddplaunch 0", file=stream)
    print("text\\x1eddplaunch {}", file=stream, flush=True)
    print("\\x1eddplaunch here 9.9", file=stream, flush=True)
raise SystemExit(3)
"""


@pytest.mark.parametrize("slots", [1, 2])
def test_a_rank_cannot_speak_for_its_host(sshd, tmp_path, slots):
    """Output that looks like a message of ddplaunch is passed on as text."""
    write_program(tmp_path, "train.py", FORGES)
    run = Job(sshd(2), tmp_path, "--hosts", f"n1:{slots}", *LIGHT, "train.py")
    assert run.wait() == 3, run.stderr()
    for output in (run.stdout(), run.stderr()):
        for line in ("\x1eddplaunch 0\n", "text\x1eddplaunch {}\n", "\x1eddplaunch here 9.9\n"):
            assert line in output
    run.assert_nothing_left()
