"""Tests of what is said about the collectives in which ranks were when native code failed in one."""

from msgspec.structs import replace

from ddplaunch.observe.diagnosis.crash import describe_crash
from ddplaunch.observe.diagnosis.inspection import (
    Collective,
    Frame,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
)

C10D = Frame(file="torch/distributed/distributed_c10d.py", line=1, function="all_reduce", own=False)


def rank(number, tensors, *, line=9, operation="all_reduce", stack=True):
    """A rank that is in its seventh collective, at a line of train.py; the stack of a crashed one is unknown."""
    last = Collective("0", 7, operation, tensors, 600.0, 1.0, completed=False, alone=True)
    frames = (replace(C10D, function=operation), Frame(file="train.py", line=line, function="step", own=True))
    threads = (Thread(frames),) if stack else ()
    found = RankInspection(number, "n0", 1, ProcessCondition.ALIVE, threads=threads, answers=True)
    return replace(found, groups=(GroupState("0", 7, 6),), last=(last,))


def crash(*ranks):
    return describe_crash(Inspection(9.0, ranks, len(ranks)), 1)


def test_different_collectives():
    text = crash(rank(0, "float32[100]"), rank(1, "float32[8]", stack=False))
    assert text == (
        "ranks entered different collectives: #7 of default_pg is all_reduce of float32[100] on rank 0 (train.py:9) "
        "and all_reduce of float32[8] on rank 1"
    )


def test_equal_collectives():
    text = crash(*(rank(each, "float32[8]", line=9 + each % 2, stack=each != 1) for each in range(4)))
    assert text.splitlines() == [
        "it was in all_reduce #7 of float32[8]",
        "ranks 0, 2 were in all_reduce #7 of float32[8], step at train.py:9",
        "rank 3 was in all_reduce #7 of float32[8], step at train.py:10",
    ]


def test_a_rank_that_was_in_none():
    idle = RankInspection(1, "n0", 1, ProcessCondition.ALIVE, answers=True)
    assert crash(rank(0, "float32[8]"), idle) == ""
    assert describe_crash(Inspection(9.0, (rank(0, "float32[8]"),), 2), 1) == ""
    gone = RankInspection(0, "n0", 1, ProcessCondition.EXITED, code=0)
    assert crash(gone, rank(1, "float32[8]")) == "it was in all_reduce #7 of float32[8], step at train.py:9"
