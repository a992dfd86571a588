"""Tests of what a program can see of the inspection endpoint in its rank."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import write_program
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

BEGIN = """
import gc, os, sys, threading, time, traceback, warnings
import torch, torch.distributed as dist
warnings.simplefilter("error")  # after torch, which is not preloaded otherwise

def threads():
    return len(os.listdir("/proc/self/task"))

def ours():
    return [frame for frame in sys._current_frames().values() if "inspection_endpoint.py" in frame.f_code.co_filename]

def in_rank(text):
    if os.environ["RANK"] == "0":
        print(text, flush=True)
"""


def run(launch, tmp_path, how, program):
    done = launch("run", *how, "--nproc", "2", write_program(tmp_path, "train.py", BEGIN + program))
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("[0] ") for line in done.stdout.splitlines()]


FIRST_CALL_FAILS = """
hooked = dist.init_process_group
in_rank(len(ours()))
try:
    dist.init_process_group("no such backend")
except Exception as error:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    in_rank(any("inspection_endpoint.py" in file for file in files))
while not ours():  # the thread has been started, and may not have run yet
    time.sleep(0.01)
in_rank(len(ours()))
# The failed call has left a store in rank 0: it must be gone before rank 1 connects again.
gc.collect()
open("failed." + os.environ["RANK"], "w").close()
while not all(os.path.exists("failed." + rank) for rank in "01"):
    time.sleep(0.01)
dist.init_process_group("gloo")
in_rank(dist.init_process_group is hooked)
in_rank([type(cell.cell_contents).__name__ for cell in hooked.__closure__])
in_rank([each for each in sys.meta_path if "ddplaunch" in type(each).__module__ or "answers" in repr(type(each))])
in_rank(threading.active_count())
dist.barrier()  # neither ends while the other still connects
dist.destroy_process_group()
class Late:
    def __del__(self, stack=traceback.extract_stack, write=os.write, first=os.environ["RANK"] == "0"):
        files = [frame.filename for frame in stack()]
        if first:
            write(1, b"the rank runner" if any("rank_exit.py" in file for file in files) else b"Python")
late = Late()
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "ended_by"),
    [
        pytest.param((), "the rank runner", id="fork"),
        pytest.param(EXEC, "Python", id="exec", marks=pytest.mark.ci),
    ],
)
def test_after_the_first_init_process_group_only_a_thread_is_left(run_ddplaunch, tmp_path, how, ended_by):
    """No frame of the hook is in the error of that call. The thread does not delay the end of the rank."""
    printed = run(run_ddplaunch, tmp_path, how, FIRST_CALL_FAILS)
    assert printed == ["0", "False", "1", "True", "['function']", "[]", "1", ended_by]


@pytest.mark.ci
def test_forks_of_the_program_have_no_endpoint_thread(run_ddplaunch, tmp_path):
    """A fork that calls init_process_group first has none: its replies would be taken for the rank's.

    Once the group is destroyed, the thread ends before a fork: Python 3.12 warns of a fork beside threads, and a
    warning is an error here; torch's own threads are gone by then.
    """
    program = """
pid = os.fork()
if pid == 0:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    in_rank(len(ours()))
    os._exit(0)
os.waitpid(pid, 0)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
in_rank(len(ours()))
alone = threads() - 1
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
in_rank((len(ours()), threads() - alone))
"""
    assert run(run_ddplaunch, tmp_path, (), program) == ["0", "1", "(0, 0)"]


WOKEN_IN_AN_IMPORT = """
import os, _signal, sys, _frozen_importlib

(number,) = [each for each in range(1, 65) if getattr(_signal.getsignal(each), "__name__", "") == "_write_stacks"]

class Woken(type(_frozen_importlib._blocking_on)):
    def __setitem__(self, thread, lock):
        super().__setitem__(thread, lock)
        sys.modules.pop("_socket", None)
        _signal.raise_signal(number)

_frozen_importlib._blocking_on = Woken()
import colorsys
print("imported", colorsys.__name__)
"""
"""As if a request came at the worst instant of an import: the handler must not import at that time."""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="since Python 3.12 a signal handler may import at any time")
def test_a_request_does_not_break_an_import_of_the_program(run_ddplaunch, tmp_path):
    program = write_program(tmp_path, "train.py", WOKEN_IN_AN_IMPORT)
    done = run_ddplaunch("run", *EXEC, "--nproc", "1", program)
    assert (done.returncode, done.stdout) == (0, "imported colorsys\n"), done.stderr
