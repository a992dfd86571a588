"""Tests of failed jobs: the report names the first cause, and the exit code is that of the first rank that failed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.core.agent.rank_files import last_lines, signal_hint
from ddplaunch.core.failures import RankFailure, describe_exit, find_first_cause
from tests.conftest import PROGRAMS, write_program
from tests.start_modes import EXEC, FORKED, LIGHT

FAILS = PROGRAMS / "fails.py"


@pytest.mark.parametrize(
    ("mode", "how", "code", "headline"),
    [
        pytest.param(
            *(FORKED, "exception", 1, "rank 1 failed with ValueError: rank 1 fails (exit code 1)"),
            marks=pytest.mark.smoke,
        ),
        pytest.param(
            *(FORKED, "kill", 137, "rank 1 was ended by SIGKILL (killed from outside)"), marks=pytest.mark.smoke
        ),
        (EXEC, "segv", 139, "rank 1 was ended by SIGSEGV (segmentation fault in native code)"),
        (FORKED, "bus", 135, "rank 1 was ended by SIGBUS"),
    ],
)
def test_the_report_names_the_reason_and_the_exit_code(run_ddplaunch, mode, how, code, headline):
    done = run_ddplaunch("run", *mode, "--nproc", "3", FAILS, how, "1")
    assert done.returncode == code
    report = done.stderr[done.stderr.index("ddplaunch: ") :]
    assert report.startswith(f"ddplaunch: {headline}")
    assert "2 other ranks were stopped" in report
    assert not re.search(r"rank/(rank_runner|zygote)\.py", report)
    frames = [line.strip() for line in report.splitlines() if "  File " in line]
    if how == "exception":  # only those of the user's code
        assert [frame.partition(", line ")[0] for frame in frames] == [f'File "{FAILS}"']
    assert ("/dev/shm, which DataLoader workers need, has" in report) == (how == "bus")


def test_a_long_message_does_not_hide_the_report(run_ddplaunch, tmp_path):
    done = run_ddplaunch(
        "run", *LIGHT, "--nproc", "2", "--show", "none", write_program(tmp_path, "t.py", 'raise OSError("x" * 3000)')
    )
    headline, *lines = done.stderr.splitlines()
    assert re.fullmatch(r"ddplaunch: rank \d failed with OSError: x{280,300}… \(exit code 1\)", headline)
    assert re.fullmatch(r"  OSError: x{391}… \(2609 characters more\)", lines[-2])


@pytest.mark.slow
def test_torchelastics_error_file_explains_a_failure(run_ddplaunch, tmp_path):
    """A function with @record writes it; the launcher's own record does not overwrite it."""
    script = write_program(
        tmp_path,
        "recorded.py",
        """
        import json, os
        message = {"message": "by the program", "extraInfo": {"py_callstack": "the callstack", "timestamp": "1"}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
        raise LookupError("raised after that")
        """,
    )
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", script)
    assert done.returncode == 1
    assert "failed with by the program (exit code 1)" in done.stderr
    assert "the callstack" in done.stderr


def test_a_single_rank_is_not_reported_twice(run_ddplaunch):
    """Its traceback is on the terminal already; one line says how the job ended."""
    done = run_ddplaunch("run", FAILS, "exception")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("ddplaunch: rank 0 failed with ValueError: rank 0 fails (exit code 1)")


def test_descriptions_of_exit_codes():
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was ended by SIGKILL (killed from outside)"
    assert describe_exit(-10) == "was ended by SIGUSR1"
    assert "does not handle this signal" in (signal_hint(10) or "")
    assert describe_exit(-62) == "was ended by signal 62"


def _failure(rank, moment, message=None, code=1):
    return RankFailure(rank, rank, "here", 1, 0, code, None, message, None, moment, None)


def test_a_lost_connection_is_never_the_first_cause_where_there_is_another():
    verdict = find_first_cause(
        [
            _failure(0, 1.0, "RuntimeError: Connection closed by peer [127.0.0.1]:4711"),
            _failure(2, 3.0, "KeyError: 'x'"),
            _failure(1, 2.0, "RuntimeError: Connection closed by peer [127.0.0.1]:4712"),
        ],
        stopped=1,
        world_size=4,
    )
    assert verdict.first.rank == 2
    assert [each.rank for each in verdict.others] == [0, 1]


def test_a_rank_that_timed_out_is_reported_before_ranks_that_lost_their_connection_to_it():
    closed = _failure(0, 10.0, "RuntimeError: Connection closed by peer")
    late = _failure(1, 11.0, "RuntimeError: Timed out waiting 4000ms for recv operation to complete")
    assert find_first_cause([closed, late], 1, 3).first is late
    cause = _failure(2, 12.0, "TimeoutError: no answer from the database")
    assert find_first_cause([closed, late, cause], 0, 3).first is cause


@pytest.mark.parametrize(
    ("message", "waited"),
    [
        ("RuntimeError: Operation timed out!", True),
        ("RuntimeError: Application timeout caused pair closure", True),
        ("torch.distributed.DistStoreError: Wait timeout", True),
        ("torch.distributed.DistStoreError: Timeout waiting for key: default_pg/0", True),
        ("OperationalError: (1205, 'Lock wait timeout exceeded; try restarting transaction')", False),
        ("TimeoutError: the operation timed out", False),
    ],
)
def test_timeouts_of_torch_are_secondary_failures(message, waited):
    assert _failure(0, 0.0, message).is_secondary is waited


def _raised(rank, moment, message, *files):
    frames = "".join(f'  File "{file}", line 3, in step\n    go()\n' for file in ("/job/train.py", *files))
    failure = _failure(rank, moment, message)
    return replace(failure, traceback=f"Traceback (most recent call last):\n{frames}{message}\n")


C10D, BACKWARD, UPLOAD = (
    f"/venv/lib/python3.11/site-packages/{file}.py"
    for file in ("torch/distributed/distributed_c10d", "torch/autograd/graph", "fsspec/asyn")
)
CLOSED, RESET = "RuntimeError: Connection closed by peer", "ConnectionResetError: [Errno 104] Connection reset by peer"
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
LATE = "torch.distributed.DistStoreError: wait timeout after 4000ms"
IN_USE = "torch.distributed.DistNetworkError: The server socket has failed. name: EADDRINUSE, address already in use"
STORE_GONE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"

FIRST_CAUSES: dict[str, tuple[list[Any], int]] = {
    "the earliest that is not secondary": ([(0, 1, CLOSED, C10D), (1, 3, "KeyError"), (2, 2, "ValueError")], 2),
    "a lost connection in a collective": ([(0, 1, CLOSED, C10D), (1, 2, "KeyError")], 1),
    "in a backward pass": ([(0, 1, CLOSED, BACKWARD), (1, 2, "KeyError")], 1),
    "in the wait of a collective, which has no frame": ([(0, 1, GLOO), (1, 2, "KeyError")], 1),
    "of a store, which has no frame": ([(0, 1, STORE_GONE), (1, 2, "KeyError")], 1),
    "of an upload": ([(0, 1, RESET), (1, 2, "KeyError")], 0),
    "of an upload, and a rank that lost the connection to it": ([(0, 1, CLOSED, C10D), (1, 2, RESET)], 1),
    "of an upload below torch's checkpoint": ([(0, 1, RESET, C10D, UPLOAD), (1, 2, "KeyError")], 0),
    "of a database": ([(0, 1, "RuntimeError: Connection refused"), (1, 2, CLOSED, C10D)], 0),
    "a port in use": ([(0, 2, IN_USE, C10D), (1, 1, CLOSED, C10D)], 0),
    "a timeout before the connections that it closed": ([(0, 1, CLOSED, C10D), (1, 2, LATE, C10D)], 1),
    "a timeout of the program's own": ([(0, 2, "OSError: Timed out after 30 s"), (1, 1, LATE, C10D)], 0),
    "of lost connections the earliest": ([(0, 2, CLOSED, C10D), (1, 1, GLOO, C10D)], 1),
}
"""Failures (rank, moment, message, files of the frames below the program's), and the rank that is the first cause."""


@pytest.mark.parametrize("name", FIRST_CAUSES)
def test_the_first_cause(name):
    failures, first = FIRST_CAUSES[name]
    assert find_first_cause([_raised(*each) for each in failures], 0, 4).first.rank == first


def test_of_equal_failures_the_lowest_rank_is_named():
    verdict = find_first_cause(
        [_failure(rank, 5.0 - rank, "KeyError: 'x'") for rank in (3, 1, 2)], stopped=0, world_size=4
    )
    assert verdict.first.rank == 1
    assert verdict.alike == (2, 3)


def test_last_lines_show_the_last_state_of_a_progress_bar():
    assert last_lines(b"a\n\r 1%\r 2%\r 3%\n\nlast") == ("a", " 3%", "last")


FRAMES = (
    "frame #{}: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f0000000000 in /lib/libc10.so)",
    "#{} 0x00007f0000000000 in raise () from /lib/libc.so.6",
    "    @     0x7f00000000{:02} c10d::ProcessGroupNCCL::Watchdog::run()",
    "[n0:4711] [{:2}] /lib/libc.so.6(+0x42520)[0x7f0000000000]",
    "/lib/libc.so.6(abort+0x{}) [0x7f0000000000]",
)


@pytest.mark.parametrize("frame", FRAMES)
def test_native_frames_do_not_hide_a_traceback_of_python(frame):
    frames = [frame.format(number) for number in range(200)]
    traceback = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()", "KeyError: 1"]
    printed = ["epoch 1", *traceback, "terminate called after throwing an instance", *frames, "#7 is the last batch"]
    shown = ("epoch 1", *traceback, "terminate called after throwing an instance", "#7 is the last batch")
    assert last_lines("\n".join(printed).encode()) == shown
    stack = ["Fatal Python error: Aborted", *(f'  File "b.py", line {number} in g' for number in range(30))]
    ends = [*traceback, *stack][:12]
    assert list(last_lines("\n".join([*traceback, *frames, *stack]).encode())) == ends
    assert last_lines("\n".join(frames).encode()) == tuple(line.rstrip() for line in frames[-12:])


def test_the_report_of_an_abort_has_its_last_lines_and_the_traceback_before_native_frames(run_ddplaunch, tmp_path):
    frame = FRAMES[0].format(7)
    script = write_program(
        tmp_path,
        "aborts.py",
        f"""
        import os, sys, traceback
        for number in range(50):
            print("step", number)
        sys.stdout.flush()
        try:
            raise KeyError("the cause")
        except KeyError:
            traceback.print_exc()
        print("\\n".join(200 * [{frame!r}]), file=sys.stderr, flush=True)
        os.abort()
        """,
    )
    done = run_ddplaunch("run", "--nproc", "2", *LIGHT, "--show", "none", script)
    report = done.stderr.partition("its last lines:")[2]
    assert "  | step 49\n" in report
    assert "| step 1\n" not in report
    assert "  | KeyError: 'the cause'\n" in report
    assert "frame #" not in report
