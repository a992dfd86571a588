"""Debian's Open MPI on several hosts: what its daemons tell each other is enough for the launchers to meet."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from tests.conftest import clean_environment, command, wait_until, write

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="NO OPEN MPI HERE: package openmpi-bin")


SHOWS = """
import os
import socket
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
print("sum", int(total), "on", socket.gethostname(), *(os.environ[name] for name in names.split()))
dist.destroy_process_group()
"""

SLEEPS = """
import os
import sys
import time

print("up", flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise SystemExit(7)
time.sleep(600)
"""

A_HOST_EACH = ["--host", "n1:1,n2:1", "-npernode", "1"]
A_RANK_EACH = ["--host", "n1:2,n2:1"]


@pytest.fixture
def on_hosts(sshd, tmp_path):
    """Run mpirun on n0 of three hosts, which reaches the others by SSH; in the end no host has anything left of it."""
    servers = sshd(3)

    def start(options, *words) -> subprocess.Popen[str]:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return servers.start(
            servers.network.hosts[0],
            ["mpirun", *root, *options, "-x", "OMP_NUM_THREADS", "-x", "NO_COLOR", *command("run", *words)],
            cwd=tmp_path,
            env=clean_environment({"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    yield start
    ours = "ddplaunch|zygote|orted|train\\.py"
    wait_until(lambda: not [pid for host in servers.network.hosts for pid in host.find(ours)], "the end of it all")


@pytest.mark.parametrize(
    ("options", "words", "shown"),
    [
        (
            A_HOST_EACH,
            ["--nproc", "2"],
            ["4 on n1 0 0 4 2 0 2", "4 on n1 1 1 4 2 0 2", "4 on n2 2 0 4 2 1 2", "4 on n2 3 1 4 2 1 2"],
        ),
        (A_RANK_EACH, [], ["3 on n1 0 0 3 2 0 2", "3 on n1 1 1 3 2 0 2", "3 on n2 2 0 3 1 1 2"]),
        (["--host", "n1:1,n0:1", "-npernode", "1"], [], ["2 on n0 0 0 2 1 0 2", "2 on n1 1 0 2 1 1 2"]),
    ],
    ids=["a host each", "a rank each", "mpirun's own host too"],
)
def test_hosts_find_each_other(on_hosts, tmp_path, options, words, shown):
    write(tmp_path, "train.py", SHOWS)
    run = on_hosts(options, *words, "train.py")
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 0, out
    lines = sorted(line.rstrip() for line in out.splitlines() if "] sum" in line)
    assert lines == [f"[{rank}] sum {line}" for rank, line in enumerate(shown)], out


@pytest.mark.slow
@pytest.mark.parametrize("options", [A_HOST_EACH, A_RANK_EACH], ids=["a host each", "a rank each"])
def test_one_that_fails_on_a_host_ends_all(on_hosts, tmp_path, options):
    write(tmp_path, "train.py", SLEEPS)
    run = on_hosts(options, "--nproc", "2" if options is A_HOST_EACH else "1", "train.py", "fail")
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 7, out
    assert "ddplaunch: rank 1 exited with code 7 (on n1)" in out


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("options", [A_HOST_EACH, A_RANK_EACH], ids=["a host each", "a rank each"])
def test_the_end_of_mpirun_is_that_of_all_hosts(on_hosts, tmp_path, options, how):
    write(tmp_path, "train.py", SLEEPS)
    run = on_hosts(options, "train.py")
    up = 0
    while up < (2 if options is A_HOST_EACH else 3):
        line = run.stdout.readline()
        assert line, "mpirun has ended"
        up += "up" in line
    run.send_signal(how)
    out, _ = run.communicate(timeout=60)
    assert run.returncode in (1, -how), out
