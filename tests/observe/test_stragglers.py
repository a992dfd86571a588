"""Tests that a straggler is named, with the process that it waits for."""

import os
import socket

import pytest

from ddplaunch.observe.node import straggler_monitor
from tests.conftest import free_port, wait_until, write_program
from tests.constant_override import launcher_with_constant
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, FORKED, LIGHT

STRAGGLER = "rank 2 still running 2.0s after the others had ended (--straggler-timeout): save at train.py:5"

pytestmark = pytest.mark.slow

STRAGGLING = "observe.node.straggler_monitor.NAME_DELAY_S"

WAITS_FOR_PIPE = """
    import os

    print(os.environ["RANK"], os.getpid(), flush=True)
    if os.environ["RANK"] in ("0", "3"):
        open("end").close()  # a pipe: until it has a writer
"""


def test_stragglers_are_named_once(start_ddplaunch, tmp_path):
    assert straggler_monitor.NAME_DELAY_S == 30
    os.mkfifo(tmp_path / "end")
    script = write_program(tmp_path, "train.py", WAITS_FOR_PIPE)
    sooner = launcher_with_constant(tmp_path, STRAGGLING, scaled_timeout(1))
    job = start_ddplaunch("run", *LIGHT, "--nproc", "4", script, executable=sooner)
    wait_until(job.stderr, "a note on the ranks that still run")
    pids = dict(line.split()[1:] for line in job.stdout().splitlines())
    assert job.stderr() == (
        f"ddplaunch: the other ranks are done; waiting for rank 0 (pid {pids['0']}): train.py:5; "
        f"rank 3 (pid {pids['3']}): train.py:5\n"
    )
    (tmp_path / "end").open("w").close()
    assert job.wait() == 0
    assert job.stderr().count("\n") == 1
    job.assert_nothing_left()


RUNS_ON = """
    import os
    import time

    def save():
        time.sleep(1000)

    if os.environ["RANK"] == "2":
        save()
"""


def test_the_straggler_timeout_ends_the_job(run_ddplaunch, tmp_path):
    script = write_program(tmp_path, "train.py", RUNS_ON)
    done = run_ddplaunch("run", *LIGHT, "--straggler-timeout", "2", "--nproc", "3", script)
    assert done.returncode == 124
    lines, *trace = done.stderr.splitlines()
    assert lines == f"ddplaunch: {STRAGGLER}"
    assert trace == ["  it was at", '    File "train.py", line 8, in <module>', '    File "train.py", line 5, in save']


@pytest.mark.ci
@pytest.mark.parametrize("nproc", ["2", pytest.param("1", marks=pytest.mark.ci)], ids=["beside another", "alone"])
def test_a_straggler_on_another_node_is_named_with_its_host_and_ended(start_ddplaunch, tmp_path, nproc):
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = write_program(tmp_path, "train.py", RUNS_ON)
    words = ("run", *LIGHT, "--start", "zygote", "--straggler-timeout", "2", "--nnodes", "2", *address)
    sooner = launcher_with_constant(tmp_path, STRAGGLING, 0.5)
    node_0 = start_ddplaunch(*words, "--nproc", "2", "--node-rank", "0", script)
    node_1 = start_ddplaunch(*words, "--nproc", nproc, "--node-rank", "1", script, executable=sooner)
    assert [node.wait() for node in (node_0, node_1)] == [124, 124]
    assert f"{STRAGGLER} (on {socket.gethostname()})" in node_0.stderr()
    if nproc == "2":
        assert f"the other ranks on {socket.gethostname()} are done; waiting for rank 2 (pid" in node_1.stderr()
    for node in (node_0, node_1):
        node.assert_nothing_left()


FAILS_AND_STAYS = """
    import atexit, os, sys, threading

    def hang(os=os):  # at the interpreter's end, globals and builtins are gone
        os.close(os.open("end", os.O_RDONLY))  # a pipe, until it has a writer

    class Odd(Exception):
        def __str__(self):
            hang()
            return "odd"

    class Held:
        def __del__(self, hang=hang):
            hang()

    rank = os.environ["RANK"]
    print(rank, os.getpid(), flush=True)
    if rank == "0":
        threading.Thread(target=hang).start()
    elif rank == "1":
        atexit.register(hang)
    elif rank == "2":
        held = Held()
    elif rank == "3":
        threading.Thread(target=hang).start()
        sys.exit(3)
    elif rank == "4":
        raise Odd
    raise ValueError("the loss is nan")
"""


@pytest.mark.parametrize("mode", [FORKED, EXEC], ids=["zygote", "exec"])
def test_a_rank_that_has_failed_and_still_runs_is_named(start_ddplaunch, tmp_path, mode):
    """A thread, an ``atexit`` handler, a destructor or the exception's own ``__str__`` keeps it running."""
    assert straggler_monitor.FAILED_S == 5
    os.mkfifo(tmp_path / "end")
    script = write_program(tmp_path, "train.py", FAILS_AND_STAYS)
    sooner = launcher_with_constant(tmp_path, "observe.node.straggler_monitor.FAILED_S", scaled_timeout(1))
    job = start_ddplaunch("run", *mode, "--show", "all/out", "--nproc", "5", script, executable=sooner)
    wait_until(lambda: job.stderr().count("but is still running") == 5, "a note on each rank")
    pids = dict(line.split()[1:] for line in job.stdout().splitlines())
    failed = "raised ValueError: the loss is nan"
    over = "its program has ended, and Python is shutting down"
    expected = {
        "0": f"{failed}, but is still running: it waits for its threads to end, hang at train.py:4",
        "1": f"{failed}, but is still running: hang at train.py:4",
        "2": f"{failed}, but is still running: {over}",
        "3": "called sys.exit(3), but is still running: it waits for its threads to end, hang at train.py:4",
        "4": "raised Odd, but is still running: hang at train.py:4",
    }
    notes = [line for line in job.stderr().splitlines() if "but is still running" in line]
    assert sorted(notes) == [f"ddplaunch: rank {rank} (pid {pids[rank]}) has {how}" for rank, how in expected.items()]
    (tmp_path / "end").open("w").close()
    assert job.wait() in (1, 3)
    assert job.stderr().count("but is still running") == 5
    job.assert_nothing_left()
