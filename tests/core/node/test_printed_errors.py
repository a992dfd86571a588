"""Tests of what the output of a rank shows about its end: a thread's exception, a sentence of native code."""

import os

import pytest

from ddplaunch.core.agent.printed_errors import (
    add_abort_location,
    describe_thread_error,
    find_abort_reason,
    find_last_traceback,
)
from ddplaunch.core.agent.rank_files import last_lines
from tests.conftest import write_program
from tests.start_modes import LIGHT

THREAD = """step 1
Exception in thread prefetch:
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 982, in run
    self._target(*self._args, **self._kwargs)
  File "/job/data.py", line 10, in read
    raise OSError(116, "Stale file handle")
OSError: [Errno 116] Stale file handle
step 2
"""
GLOO = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /src/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 100 vs 8. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?
Fatal Python error: Aborted
"""  # noqa: E501


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (THREAD, "its thread prefetch had failed: OSError: [Errno 116] Stale file handle (read at data.py:10)"),
        (THREAD.replace("prefetch", "Thread-1 (read)"), "its thread Thread-1 (read) had failed: OSError"),
        ("Exception in thread ", None),
        ("Traceback (most recent call last):\n", None),
        ("", None),
    ],
)
def test_the_exception_of_a_thread(printed, expected):
    found = describe_thread_error(printed.encode(), "/job")
    assert found == expected if expected is None else (found or "").startswith(expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (
            GLOO,
            "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
        ),
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  no\n", "no"),
        ("epoch 1\nfree(): invalid pointer\nFatal Python error: Aborted\n", "free(): invalid pointer"),
        ("t: a.c:3: main: Assertion `x > 0' failed.\n", "t: a.c:3: main: Assertion `x > 0' failed."),
        ("terminate called without an active exception\n", None),
        ("epoch 1\n", None),
    ],
)
def test_the_sentence_of_an_abort(printed, expected):
    assert find_abort_reason(printed.encode()) == expected


DUMP = """Fatal Python error: Aborted

Thread 0x00007ff2ae5ff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007ff2ce847b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/job/train.py", line 10 in step
  File "/job/train.py", line 90 in <module>
"""


def test_where_an_aborted_rank_was():
    assert add_abort_location(None, DUMP.encode(), "/job") == "it was in all_reduce, step at train.py:10"
    for printed in (DUMP.replace("distributed_c10d", "x"), ""):
        assert add_abort_location(None, printed.encode(), "/job") is None
        assert add_abort_location("a hint", printed.encode(), "/job") == "a hint"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (
            "it was in all_reduce #7 of float32[8]\nmore",
            "it was in all_reduce #7 of float32[8], step at train.py:10\nmore",
        ),
        ("it was in all_reduce #7, step at train.py:10", "it was in all_reduce #7, step at train.py:10"),
        (
            "it was in all_reduce_coalesced #7",
            "it was in all_reduce, step at train.py:10\nit was in all_reduce_coalesced #7",
        ),
        ("ranks differ", "it was in all_reduce, step at train.py:10\nranks differ"),
    ],
)
def test_the_line_is_added_to_the_collective(hint, expected):
    assert add_abort_location(hint, DUMP.encode(), "/job") == expected


def test_of_the_stack_after_a_fatal_error_the_innermost_frames_are_shown():
    frames = [f'  File "/job/train.py", line {number} in deep' for number in range(40)]
    found = last_lines("\n".join(["epoch 1", "what(): no", "Fatal Python error: Aborted", *frames]).encode(), 6)
    assert found == ("epoch 1", "what(): no", "Fatal Python error: Aborted", *frames[:3])


FAILS_TWICE = """
import os, queue, threading

def read():
    raise OSError(116, "Stale file handle")

if os.environ["RANK"] == "1":
    thread = threading.Thread(target=read, name="prefetch")
    thread.start()
    thread.join()
    queue.Queue().get(timeout=0.1)
"""
GIVES_UP_RIGHTS = """
import os

os.chmod(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), 0o700)
os.setuid(65534)
raise ValueError("no")
"""
ABORTS = "import os, sys; sys.stderr.write('free(): invalid pointer\\n'); sys.stderr.flush(); os.abort()"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            FAILS_TWICE,
            "ddplaunch: rank 1 failed with Empty (exit code 1)\n"
            "  its thread prefetch had failed: OSError: [Errno 116] Stale file handle (read at train.py:4)\n",
        ),
        pytest.param(
            GIVES_UP_RIGHTS,
            "failed with ValueError: no (exit code 1)\n",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
        ),
        (ABORTS, "was ended by SIGABRT: free(): invalid pointer\n"),
    ],
)
def test_the_report(run_ddplaunch, tmp_path, program, expected):
    write_program(tmp_path, "train.py", program)
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "train.py")
    assert expected in done.stderr


PRINTED = """step
{0}Traceback (most recent call last):
{0}  File "/job/t.py", line 4, in <module>
{0}    f()
{0}ValueError: no
"""


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (PRINTED.format(""), "ValueError: no"),
        (PRINTED.format("[rank1]: "), "ValueError: no"),
        (PRINTED.format("") + "and went on\n", None),
        ("step\n", None),
    ],
)
def test_the_traceback_at_the_end_of_the_output(printed, message):
    found = find_last_traceback(printed.encode())
    assert (found and found[0]) == message
    assert found is None or found[1].startswith("Traceback (most recent call last):\n  File ")


MISMATCH = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()

def step():
    dist.all_reduce(torch.ones(8 if dist.get_rank() == 1 else 100))

step()
"""


@pytest.mark.ci
def test_an_abort_of_gloo(run_ddplaunch, tmp_path):
    """Its sentence is in the headline; both ranks are named with their collectives."""
    write_program(tmp_path, "train.py", MISMATCH)
    done = run_ddplaunch("run", "--show", "none", "--nproc", "2", "train.py")
    first, where, differ, *_, last = done.stderr.splitlines()
    assert first.startswith("ddplaunch: rank 1 was ended by SIGABRT: Received data size doesn't match expected size.")
    assert where == "  it was in all_reduce, step at train.py:7"
    both = "all_reduce of float32[100] on rank 0 (train.py:7) and all_reduce of float32[8] on rank 1"
    assert differ == f"  ranks entered different collectives: #2 of default_pg is {both}"
    if last != "  1 other rank was stopped":  # before it had noticed
        assert last.startswith("  then rank 0 failed: RuntimeError: ")
        assert last.endswith(", in all_reduce at train.py:7")
