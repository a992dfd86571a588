"""Tests that an exception raised while its rank still cleans up is reported as the cause."""

import textwrap

import pytest

from ddplaunch.observe.node.in_flight import propagates
from tests.conftest import write_program
from tests.start_modes import LIGHT

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist

def train():
    if os.environ["RANK"] == "0":
        raise ValueError("loss is nan at step 812")
    dist.all_reduce(torch.ones(1))

dist.init_process_group("gloo")
dist.barrier()
try:
    train()
finally:
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        time.sleep(float(sys.argv[1]))
        print("cleaned up")
"""
WITHOUT_GROUP = """
import os, sys, time

def train():
    if os.environ["RANK"] == "0":
        raise ValueError("loss is nan at step 812")
    while not os.path.exists("closed"):
        time.sleep(0.01)
    raise RuntimeError("[/src/gloo/pair.cc:538] Connection closed by peer")

try:
    train()
finally:
    open("closed", "w").close()
    if os.environ["RANK"] == "0":
        time.sleep(float(sys.argv[1]))
        print("cleaned up")
"""
CAUGHT = """
import os, sys, time
import torch, torch.distributed as dist
try:
    import nothing_of_this_name
except ImportError:
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        dist.all_reduce(torch.ones(1))  # fails when rank 0 closes its connections
    dist.destroy_process_group()
    time.sleep(600)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("program", "mode", "seconds", "grace", "cleaned"),
    [(PROGRAM, (), "600", "0.5", False), (WITHOUT_GROUP, LIGHT, "2", "30", True)],
    ids=["killed", "cleans up"],
)
def test_a_long_finally_does_not_hide_its_exception(run_ddplaunch, tmp_path, program, mode, seconds, grace, cleaned):
    """The exception is reported also if the grace is too short for the ``finally``."""
    script = write_program(tmp_path, "train.py", program)
    done = run_ddplaunch("run", *mode, "--nproc", "2", "--grace", grace, script, "--", seconds)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("ddplaunch: ") :].splitlines()
    assert report[0] == "ddplaunch: rank 0 failed with ValueError: loss is nan at step 812 (exit code 1)"
    assert "then rank 1 failed: RuntimeError: " in report[-1]
    assert ("[0] cleaned up" in done.stdout) is cleaned


@pytest.mark.ci
def test_a_caught_exception_is_not_the_cause(run_ddplaunch, tmp_path):
    """A rank in the handler of an exception is stopped like any other."""
    done = run_ddplaunch("run", "--nproc", "2", "--grace", "600", write_program(tmp_path, "train.py", CAUGHT))
    assert done.returncode == 1
    assert "rank 0 did not" in done.stderr
    assert "rank 0 failed with" not in done.stderr


SOURCE = textwrap.dedent(
    """
    try:
        work()
    except KeyError:
        caught()
    except ValueError:
        save()
        raise
    finally:
        clean()
    with writer() as a, \\
            profiler() as b:
        try:
            work()
        finally:
            try:
                close()
            except OSError:
                pass
    """
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("caught()", False), ("save()", True), ("raise", True), ("clean()", True), ("with writer", True),
     ("profiler", True), ("close()", True), ("pass", False)],
)  # fmt: skip
def test_whether_a_line_propagates_its_exception(code, expected):
    (line,) = (number for number, text in enumerate(SOURCE.splitlines(), 1) if code in text)
    assert propagates(SOURCE, line) is expected
