"""Tests of the culprit in a failure report where all ranks that failed had only waited."""

import pytest
from msgspec.structs import replace

from ddplaunch.base.stack_frames import Frame
from ddplaunch.observe.diagnosis.culprit import describe_ended_ranks, find_culprit
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition
from tests.observe.diagnosis.recorded_hangs import full_inspection, with_rank_changed
from tests.observe.diagnosis.test_waits import WAITING, collective, rank, together

LOADING = "load_batch at data.py:9"


def traceback(function="all_reduce", line='step at "/job/train.py", line 16', error="Connection closed by peer"):
    name, _, at = line.partition(" at ")
    return (
        "Traceback (most recent call last):\n"
        f"  File {at}, in {name}\n"
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper\n'
        "    return func(*args, **kwargs)\n"
        "           ^^^^^^^^^^^^^^^^^^^^^\n"
        f'  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in {function}\n'
        "    work.wait()\n"
        f"RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] {error}\n"
    )


TIMED_OUT = traceback(error="Timed out waiting 600000ms for recv operation to complete")


def ended(inspection, *numbers, code=1):
    """An inspection in which these ranks had ended before."""
    for number in numbers:
        fields = {"threads": (), "groups": (), "last": (), "known": (), "answers": None}
        inspection = with_rank_changed(inspection, number, condition=ProcessCondition.EXITED, code=code, **fields)
    return inspection


BLAMED = {
    "absent": f"rank 2 did not enter all_reduce #5, which 2 ranks waited for{{}}: {LOADING}",
    "chain": f"rank 2 did not enter all_reduce #1 of tail, which 1 rank waited for{{}}: {LOADING}",
    "circle": "ranks 0, 1 waited for each other, 0 → 1 → 0: rank 0 in all_reduce #1 of pair, "
    "rank 1 in all_reduce #5 of default_pg",
    "gil": "rank 2 did not enter all_reduce #5, which 2 ranks waited for{}: "
    "hold at data.py:13, in native code that holds the GIL",
    "loader": "rank 2 did not enter all_reduce #5, which 2 ranks waited for{}: "
    "it waits for its DataLoader, loader at data.py:37",
    "mismatch": "ranks entered different collectives: #5 of default_pg is all_reduce on ranks 0, 1 (train.py:16) and "
    "all_gather on rank 2 (train.py:45)",
    "point_to_point": f"rank 2 did not enter all_reduce #6, which 1 rank waited for{{}}: {LOADING}",
    "ran_longer": "rank 2 entered all_reduce #5, which no other rank entered: "
    "ranks 0, 1 had reached the end of the program; step at train.py:16",
    "no_init": f"rank 2 did not call init_process_group, which 2 ranks waited for{{}}: {LOADING}",
    "monitored_barrier": f"rank 2 did not call monitored_barrier, which 2 ranks waited for{{}}: {LOADING}",
}


@pytest.mark.parametrize("kind", BLAMED)
def test_the_culprit_while_all_ranks_still_wait(kind):
    found = find_culprit(full_inspection(kind))
    assert (found.ranks, found.text) == ((0, 1) if kind == "circle" else (2,), BLAMED[kind].format(""))
    until = "" if kind in ("no_init", "monitored_barrier") else " (1800 s)"  # which only a collective has
    assert find_culprit(full_inspection(kind), timed_out=True).text == BLAMED[kind].format(f" until the timeout{until}")


def test_the_facts_about_a_culprit():
    found = find_culprit(full_inspection("absent"))
    frame = Frame("load_batch", "data.py", 9, True)
    assert (found.collective, found.waiters, found.frame) == ("all_reduce #5", 2, frame)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"condition": ProcessCondition.STOPPED}, "was stopped (SIGSTOP)"),
        ({"condition": ProcessCondition.EXITED, "code": 0}, "ended (exit code 0)"),
        ({"condition": ProcessCondition.REPLACED}, "had become another program"),
    ],
)
def test_a_culprit_that_no_longer_runs(fields, text):
    fields = {"threads": (), "answers": None, "groups": (), "last": (), **fields}
    blamed = f"rank 2 {text} and did not enter all_reduce #5, which 2 ranks waited for"
    assert find_culprit(with_rank_changed(full_inspection("absent"), 2, **fields)).text == blamed


BACKWARD = traceback().replace("distributed_c10d", "graph").replace("all_reduce", "_engine_run_backward")
OWN_LINES = TIMED_OUT.split('  File "/venv')[0] + TIMED_OUT.splitlines()[-1]
LATE = f"until the timeout (600 s): {LOADING}"

FAILED = {
    "one of its timeout, and another still waits": (
        ("absent", 1), [(1, TIMED_OUT)], f"rank 2 did not enter all_reduce #5, which 2 ranks waited for {LATE}"),
    "all that waited": (
        ("absent", 0, 1), [(0, TIMED_OUT), (1, traceback())],
        f"rank 2 did not enter all_reduce #5, which 2 ranks waited for {LATE}"),
    "all that waited in backward": (
        ("absent", 0, 1), [(0, BACKWARD), (1, BACKWARD)],
        f"rank 2 did not enter collective #5, which 2 ranks waited for: {LOADING}"),
    "all that waited for what only their own lines show": (
        ("absent", 0, 1), [(0, OWN_LINES), (1, OWN_LINES)],
        f"rank 2 did not reach the point where 2 ranks waited {LATE}"),
    "all that waited in init_process_group": (
        ("no_init", 0, 1), [(rank, traceback("init_process_group")) for rank in (0, 1)],
        f"rank 2 did not call init_process_group, which 2 ranks waited for: {LOADING}"),
    "those that waited for one outside their group": (
        ("subgroup", 2), [(2, TIMED_OUT)],
        f"rank 1 did not enter all_reduce #1 of pair, which 1 rank waited for {LATE}"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_the_culprit_of_ranks_that_failed(name):
    (kind, *numbers), failed, text = FAILED[name]
    late = any("Timed out" in each for _, each in failed)
    found = find_culprit(ended(full_inspection(kind), *numbers), failed, timed_out=late, folder="/job")
    assert (found.ranks, found.text) == ((1 if kind == "subgroup" else 2,), text)


def test_a_rank_that_ended_with_0_is_the_culprit():
    gone = ended(ended(full_inspection("absent"), 0, 1), 2, code=0)
    found = find_culprit(gone, [(0, traceback()), (1, traceback())], folder="/job")
    assert found.text == "rank 2 ended (exit code 0) and did not enter all_reduce, which 2 ranks waited for"
    gone = ended(ended(full_inspection("absent"), 0, 1, code=0), 2)
    found = find_culprit(gone, [(2, traceback())], folder="/job")
    text = BLAMED["ran_longer"].replace(" #5", "").replace("reached the end of the program", "ended (exit code 0)")
    assert (found.ranks, found.text) == ((2,), text)


def test_nobody_is_the_culprit_of_a_connection_that_broke():
    alone = together(rank(0, 5, 4), rank(1, 4, 4, "f at a.py:1"))
    assert find_culprit(ended(alone, 0), [(0, traceback())]) is None
    assert find_culprit(ended(alone, 0), [(0, TIMED_OUT)], timed_out=True).ranks == (1,)
    assert find_culprit(ended(ended(alone, 0), 1, code=0), [(0, traceback())]) is not None


def test_a_store_of_the_programs_own_is_not_the_jobs():
    error = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
    own = f'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n{error}\n'
    gone = ended(ended(full_inspection("absent"), 0, code=0), 1)
    found = find_culprit(gone, [(1, own)], folder="/job")
    assert "the store" not in (found.text if found else "")


def test_failed_ranks_that_waited_in_different_collectives():
    gather = traceback("all_gather", 'mismatch at "/job/train.py", line 45')
    text = (
        "all ranks waited, but not in the same function: all_reduce on ranks 0, 1 (train.py:16) and "
        "all_gather on rank 2 (train.py:45)"
    )
    failed = [(0, TIMED_OUT), (1, traceback()), (2, gather)]
    found = find_culprit(ended(full_inspection("mismatch"), 0, 1, 2), failed, folder="/job")
    assert (found.ranks, found.text) == ((2,), text)
    assert find_culprit(ended(full_inspection("mismatch"), 0, 1), failed[:2], folder="/job").text == text


@pytest.mark.parametrize(
    "words",
    [
        "Timed out waiting 600000ms for recv operation to complete",
        "wait timeout after 600000ms, keys: /default_pg/0//cpu//0/0",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran",
    ],
)
def test_timeouts_in_messages_of_torch(words):
    found = find_culprit(
        ended(full_inspection("absent"), 0), [(0, traceback(error=words))], timed_out=True, folder="/job"
    )
    assert "until the timeout (600 s)" in found.text


def test_no_rank_is_the_culprit_without_a_reason():
    assert find_culprit(Inspection(0.0, (), 2)) is None
    assert find_culprit(together(rank(0, 4, 4, "f at a.py:1"), rank(1, 4, 4, "f at a.py:1"))) is None
    lost = ended(full_inspection("absent"), 0, 1, 2)
    assert find_culprit(lost, [(n, traceback()) for n in range(3)]) is None


def test_a_rank_that_waits_or_makes_progress_is_not_the_culprit():
    waits = rank(1, 5, 4, "all_reduce", "step at train.py:3")
    moves = rank(1, 5, 5, "f at a.py:1", moved=True)
    silent = replace(rank(1, 0, 0, answers=None, groups=()), threads=())
    for other in (waits, moves, silent):
        gone = ended(together(rank(0, 5, 5), other), 0)
        assert find_culprit(gone, [(0, traceback())]) is None


SENDS = {"answers": None, "groups": ()}
RECEIVES, WORKS = rank(0, 0, 0, "recv", "get at train.py:3", **SENDS), rank(1, 0, 0, "f at a.py:1", **SENDS)
STOPPED = {"condition": ProcessCondition.STOPPED, "threads": (), "answers": None}

STILL_WAITING = {
    "two for different reasons": (
        with_rank_changed(full_inspection("ran_longer"), 0, **STOPPED), False,
        "ranks 0, 1 did not enter all_reduce #5, which 1 rank waited for: rank 0 was stopped (SIGSTOP), "
        "rank 1 ended (exit code 0)"),
    "four for different reasons": (
        together(rank(0, 8, 7, *WAITING), *(rank(n, 7, 7, f"f at a.py:{n}") for n in range(1, 5))), False,
        "ranks 1 to 4 did not enter all_reduce #8, which 1 rank waited for: rank 1 f at a.py:1, rank 2 f at a.py:2, "
        "rank 3 f at a.py:3 and others"),
    "of a recv": (
        together(RECEIVES, WORKS), False, "rank 1 did not communicate, while 1 rank waited in recv: f at a.py:1"),
    "of a recv from any of two": (together(RECEIVES, WORKS, replace(WORKS, rank=2)), False, ""),
    "with the timeout of the collective": (
        together(rank(0, 8, 7, *WAITING, last=(collective(8),)), rank(1, 7, 7, "f at a.py:1")), True,
        "rank 1 did not enter all_reduce #8, which 1 rank waited for until the timeout (600 s): f at a.py:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", STILL_WAITING)
def test_the_culprit_of_ranks_that_still_wait(name):
    inspection, timed_out, text = STILL_WAITING[name]
    found = find_culprit(inspection, timed_out=timed_out)
    assert (found.text if found else "") == text


def test_the_culprit_of_failed_pipeline_stages():
    idle = rank(1, 2, 2, "load at data.py:2", answers=True)
    gone = ended(together(rank(0, 2, 2), idle, rank(2, 2, 2)), 0, 2)
    found = find_culprit(gone, [(0, traceback("send")), (2, traceback("recv"))], timed_out=True, folder="/job")
    assert found.text == (
        "rank 1 did not communicate, while 2 ranks waited in recv and send until the timeout: load at data.py:2"
    )


def test_rank_0_ended_with_the_store():
    """The report does not claim that rank 0 should have created the new group."""
    lost = traceback("new_group").replace("RuntimeError: ", "torch.distributed.DistNetworkError: ")
    failed = [(rank, lost) for rank in (1, 2)]
    for inspection in (
        ended(ended(full_inspection("absent"), 0, code=0), 1, 2),
        ended(full_inspection("absent"), 0, code=0),
    ):
        blamed = "rank 0 ended (exit code 0), and with it the store, which ranks 1, 2 still needed in new_group"
        assert find_culprit(inspection, failed).text == blamed
    assert "the store" not in find_culprit(ended(full_inspection("absent"), 0, code=1), failed).text


@pytest.mark.parametrize(
    ("moments", "text"),
    [
        ({0: 99.6}, "rank 0 had ended 0.4 s before (exit code 0)"),
        ({0: 100.3}, "rank 0 ended at that moment (exit code 0)"),
        ({0: 99.0, 2: 97.0}, "ranks 0, 2 had ended (exit code 0), the last of them 1.0 s before"),
        ({0: 102.0}, ""),
        ({}, ""),
    ],
)
def test_peers_that_ended_before_a_connection_was_lost(moments, text):
    inspection = ended(full_inspection("absent"), 1, code=1)
    for number, moment in moments.items():
        inspection = with_rank_changed(ended(inspection, number, code=0), number, ended=moment)
    assert describe_ended_ranks(with_rank_changed(inspection, 1, ended=99.9), 100.0) == text
