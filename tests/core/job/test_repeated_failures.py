"""Tests that a repeated failure is not restarted, and of ``--restart-on``."""

from __future__ import annotations

import pytest

from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.job.job_attempt import StopCause
from tests.conftest import write_program
from tests.core.job.job_steps import Job, joined
from tests.start_modes import FORKED

TRACEBACK = """Traceback (most recent call last):
  File "/job/train.py", line 50, in <module>
    main()
  File "/job/train.py", line {line}, in main
    loss = model(batch)
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear
    return torch._C._nn.linear(input, weight, bias)
RuntimeError: {text}
"""
ENDED = "not restarting: rank 2 failed at /job/train.py:41 in two attempts in a row"


def failure(text="label 7 at 0x7f10", line=41, collectives: int | None = 100, **changed):
    """The fields of an exception."""
    traceback = TRACEBACK.format(line=line, text=text)
    fields = {"message": f"RuntimeError: {text}", "traceback": traceback, "collectives": collectives}
    return {"rank": 2, "lived": 10.0, **fields, **changed}


def attempts(*failures, **rules):
    """A job of two nodes whose attempts fail one after the other; the remark at its end, or None if it starts again."""
    job = joined(1, **{"min_nodes": 2, "max_restarts": 9, "min_uptime": 0.0, **rules})
    for attempt, fields in enumerate(failures):
        rank, lived = fields["rank"], fields["lived"]
        job.wait(lived)
        node = rank // 2
        job.drain(
            node,
            job.fail(node, attempt=attempt, **{name: fields[name] for name in fields if name != "lived"}),
            attempt=attempt,
        )
        job.drain(1 - node, attempt=attempt)
        if ends := job.take(messages.EndJob, 1):
            (end,) = ends
            assert attempt == len(failures) - 1
            assert end.outcome.verdict.first.rank == rank
            return end.outcome.remark
        job.wait(0)
    return None


def test_files_are_named_relative_to_the_folder_of_the_job(monkeypatch):
    """The folder may have been removed meanwhile."""
    monkeypatch.delattr("os.getcwd")
    assert attempts(failure(), failure(), folder="/job") == ENDED.replace("/job/", "")


@pytest.mark.parametrize(
    "second",
    [
        failure(),
        failure("label 8 at 0x7f28"),
        failure(collectives=60),
        failure(lived=1000.0),  # a slow start is not progress
    ],
)
def test_the_same_failure_twice_is_the_last(second):
    assert attempts(failure(), second) == ENDED


@pytest.mark.parametrize(
    "second",
    [
        failure(collectives=101),
        failure("no label"),
        failure(line=42),
        failure(rank=3),
        failure(message="ValueError: label 7 at 0x7f10"),
        failure(traceback=None),
        failure(exit_code=None, signal=9),
    ],
)
def test_another_failure_is_restarted(second):
    assert attempts(failure(), second) is None


@pytest.mark.parametrize(("lived", "ends"), [(9.0, True), (13.0, True), (13.1, False)])
def test_without_collectives_the_uptime_decides(lived, ends):
    remark = attempts(failure(collectives=None), failure(collectives=None, lived=lived))
    assert remark == (ENDED if ends else None)


def test_only_two_equal_failures_in_a_row_end_the_job():
    other = failure(line=42, text="another")
    assert attempts(failure(), other, failure(), other) is None
    assert attempts(failure(), other, failure(), failure()) == ENDED


@pytest.mark.parametrize(
    "fields",
    [
        {"message": None, "traceback": None},  # sys.exit
        {"message": None, "traceback": None, "exit_code": None, "signal": 11},
        failure("Connection closed by peer [10.0.0.2]:4000"),
        failure("the collective timed out after 600 s"),
        failure(hint="the kernel's out-of-memory killer was active: probably out of memory"),
    ],
)
def test_only_equal_exceptions_of_the_program_end_the_job(fields):
    assert attempts(*({"rank": 2, "lived": 10.0, **fields} for _ in range(4))) is None


def test_equal_failures_of_jobs_of_different_size():
    job = joined(1, min_nodes=1, max_nodes=3, join_window=0.0, max_restarts=9, min_uptime=0.0)
    job.wait(0)
    for attempt, come in enumerate((2, None, None)):
        if come:
            job.join(come)
        fields = failure()
        del fields["lived"]
        job.drain(1, job.fail(1, attempt=attempt, **fields), attempt=attempt)
        for node in (0, 2) if attempt else (0,):
            job.drain(node, attempt=attempt)
        assert bool(job.take(messages.Restarting)) is (attempt < 2)
        job.wait(0)
    assert job.outcome(0).outcome.remark == ENDED


def test_always_restarts_always():
    assert attempts(*(failure() for _ in range(5)), restart_on="always") is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (failure(), "rank 2 failed with RuntimeError"),
        (failure(message="my.errors.Odd", traceback="Traceback"), "rank 2 failed with Odd"),
        ({"message": None, "rank": 2, "lived": 1.0}, "rank 2 exited with code 3"),
        (failure("[monitoredBarrier] timed out after 600 s"), "rank 2 failed with RuntimeError"),
    ],
)
def test_permanent_failures_end_a_job_with_restart_on_transient(fields, why):
    expected = f"not restarting: {why}, which is not transient (--restart-on transient)"
    assert attempts(fields, restart_on="transient") == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"exit_code": None, "signal": 9},
        {"message": "DistBackendError: NCCL error in: NCCLUtils.cpp:125, unhandled cuda error"},
        {"message": "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"},
        {"message": "DistStoreError: wait timeout after 300000ms"},
        {"message": "ConnectionResetError: [Errno 104]"},
        {"message": "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4000"},
        {"message": "RuntimeError: [2] is setting up NCCL: ncclRemoteError: a call failed"},
        {"message": "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "},
        failure(hint="the kernel's out-of-memory killer was active: probably out of memory"),
    ],
)
def test_transient_failures_are_restarted(fields):
    assert attempts(*({"rank": 2, "lived": 1.0, **fields} for _ in range(3)), restart_on="transient") is None


def test_on_stall_restart_is_a_restart_with_restart_on_transient():
    job = Job(min_nodes=1, max_restarts=1, restart_on="transient")
    cut = StopCause("the job has stalled", None, may_restart=True)
    job.machine._on_stop_cause(cut, Now(0.0, 0.0))
    job.drain(0, job.fail(0, 0))
    (again,) = job.take(messages.Restarting)
    assert isinstance(again, messages.Restarting)
    assert again.text.endswith("\nrestart 1 of 1")
    assert not job.take(messages.EndJob)


EXITS = {"message": None, "traceback": None, "rank": 2, "lived": 1.0}


@pytest.mark.parametrize(
    ("fields", "causes"),
    [
        ({**EXITS, "exit_code": 75}, "75,137"),
        ({**EXITS, "exit_code": None, "signal": 9}, "75,137"),
        ({**EXITS, "exit_code": 75}, "transient,75"),
        (failure("Connection closed by peer [10.0.0.2]:4000"), "transient,75"),
    ],
)
def test_listed_causes_are_restarted(fields, causes):
    assert attempts(fields, fields, restart_on=causes) is None


@pytest.mark.parametrize(
    ("fields", "causes", "why"),
    [
        ({**EXITS, "exit_code": 3}, "75,137", "rank 2 exited with code 3; exit code 3"),
        (
            {**EXITS, "exit_code": None, "signal": 15},
            "137,75",
            "rank 2 was ended by SIGTERM (terminated from outside); exit code 143",
        ),
        (failure(exit_code=1), "transient,75", "rank 2 failed with RuntimeError; exit code 1"),
    ],
)
def test_other_causes_end_the_job(fields, causes, why):
    assert attempts(fields, restart_on=causes) == f"not restarting: {why} is not in --restart-on {causes}"


def test_a_listed_code_restarts_the_same_exception_once():
    """Code 1 is that of every exception, so the same one twice in a row ends the job as with ``any``."""
    assert attempts(failure(exit_code=1), failure(exit_code=1), restart_on="1") == ENDED


@pytest.mark.parametrize(("causes", "restarts"), [("75", False), ("75,137", True), ("transient,75", True)])
def test_the_failure_of_another_program_is_restarted_if_it_is_listed(causes, restarts):
    job = Job(min_nodes=1, max_restarts=1, min_uptime=0.0, restart_on=causes)
    cause = StopCause("server exited with code 137", None, may_restart=True, code=137, of_program=True)
    job.machine._on_stop_cause(cause, Now(0.0, 0.0))
    job.drain(0)
    assert bool(job.take(messages.Restarting)) is restarts
    if not restarts:
        (end,) = job.take(messages.EndJob)
        assert "server exited with code 137; exit code 137 is not in --restart-on 75" in end.outcome.remark


LEAVES = """
import os, sys
sys.exit(75 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 3)
"""


def test_a_run_restarts_after_a_listed_exit_code(run_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", LEAVES)
    rules = ("--max-restarts", "5", "--restart-on", "75,transient", "--min-uptime", "0")
    done = run_ddplaunch("run", *FORKED, *rules, "train.py")
    assert done.returncode == 3
    assert done.stderr.count("restart 1 of 5") == 1
    assert "restart 2 of 5" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "not restarting: rank 0 exited with code 3; exit code 3 is not in --restart-on 75,transient"
    )


GETS_FURTHER = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for _ in range(3 + (attempt == 1)):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise KeyError(f"sample {attempt} at {hex(id(attempt))}")
dist.barrier()
"""


@pytest.mark.ci
@pytest.mark.slow
def test_no_rank_fails_twice_in_the_same_way(run_ddplaunch, tmp_path):
    """The second attempt gets one collective further than the first, the third not further than the second."""
    write_program(tmp_path, "train.py", GETS_FURTHER)
    done = run_ddplaunch("run", "--nproc", "2", "--max-restarts", "9", "--min-uptime", "0", "train.py")
    assert done.returncode == 1
    assert "not restarting: rank 1 failed at train.py:9 " in done.stderr.splitlines()[-1]
    assert ("restart 2 of 9" in done.stderr, "restart 3 of 9" in done.stderr) == (True, False)


def test_restart_on_is_passed_to_a_batch_job(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    words = ("--nodes", "2", "--restart-on", "transient", "--max-restarts", "2", "--dry-run", "train.py")
    script = run_in_fork("submit", *words).stdout
    assert "run --cluster slurm --restart-on transient --max-restarts 2 train.py" in script
