"""Tests that stacks of a working rank are complete after hundreds of dumps, and that the rank goes on."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.core.agent.node_ranks import RankProcess
from ddplaunch.observe.diagnosis.inspection import ProcessCondition
from ddplaunch.observe.diagnosis.stack_parser import parse_dump
from ddplaunch.observe.node.rank_stack_dump import RankStackDump
from ddplaunch.system.plan.rank_layout import Rank
from tests.conftest import write_program
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import FORKED

TIMES = 300

CALLS = """
    import os

    names = "=".join(f"a{n}" for n in range(1000))
    exec(f"def large(number):\\n  if number < 0: {names} = 0")  # half of a piece of the interpreter's stack
    signals = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt"))
    first = int(signals, 16) >> 33
    print("rank", os.getpid(), 34 + (first & -first).bit_length() - 1, "is there", flush=True)
    while not os.path.exists("end"):
        list(map(large, range(1000)))
"""


@pytest.mark.ci
def test_dumps_of_a_program_that_calls_and_returns_all_the_time(start_ddplaunch, tmp_path):
    job = start_ddplaunch("run", *FORKED, "--nproc", "1", write_program(tmp_path, "train.py", CALLS))
    job.wait_for("is there")
    pid, signal = map(int, re.findall(r"\d+", job.stdout()))
    (fd,) = (int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir() if "ddplaunch-stacks" in os.readlink(fd))
    pidfd = os.pidfd_open(pid)
    process = RankProcess(Rank(0, 0, 0, None, "cpu", None), pid, pidfd)
    for _ in range(TIMES):
        dump = RankStackDump(process, (signal, signal + 1), fd, ProcessCondition.ALIVE)
        over = time.monotonic() + scaled_timeout(10)
        while dump.poll():
            assert time.monotonic() < over, "no dump"
            os.sched_yield()
        assert dump.text, dump.why_not
        (thread,) = parse_dump(dump.text, str(tmp_path))
        assert Path(thread.frames[-1].file).name == "train.py"
    os.close(pidfd)
    (tmp_path / "end").touch()
    assert (job.wait(), job.stderr()) == (0, "")


TRACED = """
import ctypes, sys
from ddplaunch.core.rank.rank_runner import load_private_module

stacks = load_private_module("observe/rank/stacks")
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
trace = kind(lambda state, frame, event, value: 0)
ctypes.pythonapi.PyEval_SetTrace.argtypes = [kind, ctypes.py_object]
ctypes.pythonapi.PyEval_SetTrace(trace, "state")
stacks._write_stacks(0, None)
print(sys.gettrace(), (lambda: "continues")())
"""


def test_a_profiler_in_c_keeps_its_trace_function():
    """A dump leaves alone what ``sys.settrace`` cannot restore: the program would get a TypeError."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("state continues\n", "")
