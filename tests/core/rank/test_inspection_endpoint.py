"""Tests of what a program can see of the inspection endpoint in its rank."""

from __future__ import annotations

import pytest

from tests.conftest import write_program
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize(
    "how", [pytest.param((), id="fork"), pytest.param(EXEC, id="exec", marks=pytest.mark.ci)]
)

BEGIN = """
import os, sys, threading, time, traceback, warnings
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


@BOTH
def test_the_hook_is_gone_after_the_first_call(run_ddplaunch, tmp_path, how):
    program = """
hooked = dist.init_process_group
in_rank(len(ours()))
dist.init_process_group("gloo")
in_rank(len(ours()))
in_rank(dist.init_process_group is hooked)
in_rank([type(cell.cell_contents).__name__ for cell in hooked.__closure__])
in_rank([each for each in sys.meta_path if "ddplaunch" in type(each).__module__ or "answers" in repr(type(each))])
in_rank(threading.active_count())
dist.barrier()  # neither ends while the other still connects
"""
    assert run(run_ddplaunch, tmp_path, how, program) == ["0", "1", "True", "['function']", "[]", "1"]


@BOTH
def test_an_error_of_the_first_call_shows_no_frame_of_ours(run_ddplaunch, tmp_path, how):
    program = """
try:
    dist.init_process_group("no such backend")
except Exception as error:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    in_rank(any("inspection_endpoint.py" in file for file in files))
in_rank(len(ours()))
"""
    assert run(run_ddplaunch, tmp_path, how, program) == ["False", "1"]


def test_the_thread_makes_way_for_a_fork_once_the_group_is_destroyed(run_ddplaunch, tmp_path):
    """Python 3.12 warns of a fork beside threads, and a warning is an error here; torch's own are gone by then."""
    program = """
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.barrier()
time.sleep(0.1)
dist.destroy_process_group()
in_rank(len(ours()))
alone = threads() - 1
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
in_rank((len(ours()), threads() - alone))
"""
    assert run(run_ddplaunch, tmp_path, (), program) == ["1", "(0, 0)"]


def test_a_fork_that_calls_it_first_has_no_thread_of_ours(run_ddplaunch, tmp_path):
    """Its answers would be taken for the rank's."""
    program = """
pid = os.fork()
if pid == 0:
    os.environ.update(MASTER_PORT=str(int(os.environ["MASTER_PORT"]) + 0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    in_rank(len(ours()))
    os._exit(0)
os.waitpid(pid, 0)
dist.init_process_group("gloo")
in_rank(len(ours()))
dist.barrier()  # neither ends while the other still connects
"""
    assert run(run_ddplaunch, tmp_path, (), program) == ["0", "1"]


def test_a_rank_leaves_as_fast_as_without_it(run_ddplaunch, tmp_path):
    """It does not count as a thread of the program's, with which only the interpreter itself can end."""
    program = """
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
class Late:
    def __del__(self, stack=traceback.extract_stack, write=os.write, first=os.environ["RANK"] == "0"):
        files = [frame.filename for frame in stack()]
        if first:
            write(1, b"taken apart by us" if any("rank_exit.py" in file for file in files) else b"by Python")
late = Late()
"""
    assert run(run_ddplaunch, tmp_path, (), program) == ["taken apart by us"]
