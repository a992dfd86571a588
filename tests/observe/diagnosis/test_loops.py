"""Tests of what is a loop at one place, and in which ranks it is looked for."""

import pytest

from ddplaunch.base.stack_frames import Frame
from ddplaunch.observe.diagnosis.inspection import ProcessCondition, Thread
from ddplaunch.observe.diagnosis.loops import describe_loop, find_busy_ranks, find_loop
from ddplaunch.observe.diagnosis.stall_check import MIN_BUSY_CPUS, MIN_TRAFFIC_BYTES
from tests.observe.diagnosis.test_stall import WAITING, found, rank


def stack(*places: str) -> tuple[Frame, ...]:
    """Frames from "function:line", the outermost first."""
    return tuple(Frame(each.split(":")[0], "train.py", int(each.split(":")[1]), own=True) for each in places)


@pytest.mark.parametrize(
    ("stacks", "place"),
    [
        (["main:9 spin:88"] * 4, "train.py:88"),
        (["main:9 retry:88", "main:9 retry:90", "main:9 retry:88"], "train.py:88-90"),  # a retry that prints
        (["main:9 read:88", "main:10 read:88"] * 2, ""),  # two lines call the same function: no loop in that one
        (["main:9", "main:9 is_ready:3", "main:9"], "train.py:9"),  # while not is_ready(): pass
        (["main:9 evaluate:20 forward:3", "main:9 evaluate:20 loss:31", "main:9 evaluate:20 read:50"], ""),
        (["main:9 evaluate:20", "main:9 evaluate:60"], ""),
        (["main:9 evaluate:20", "main:9 save:80"], ""),
        (["main:9 evaluate:20", "main:40 evaluate:20"], ""),
        ([""] * 4, ""),  # no stack
    ],
)
def test_where_a_rank_loops(stacks, place):
    assert find_loop([stack(*each.split()) for each in stacks]) == place


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"busy": 1.0}, [2]),
        ({"busy": 1.0, "quiet": 0.5}, [2]),  # it prints
        ({"busy": 1.0, "answers": False, "groups": ()}, [2]),  # native code holds the GIL
        ({"busy": MIN_BUSY_CPUS / 2}, []),  # a stall
        ({"busy": None}, []),
        ({"busy": 1.0, "traffic": float(MIN_TRAFFIC_BYTES)}, []),  # a checkpoint
        ({"busy": 1.0, "moved": True}, []),
        ({"busy": 1.0, "condition": ProcessCondition.ENDING}, []),
    ],
)
def test_which_ranks_are_watched(fields, expected):
    assert [each.rank.rank for each in find_busy_ranks(found(*WAITING, rank(2, 4, **fields)))] == expected


def test_the_sentence():
    (busy,) = find_busy_ranks(found(*WAITING, rank(2, 4, busy=1.0, threads=(Thread(stack("spin:88")),))))
    where = find_loop([busy.user_frames])
    expected = "rank 2 has been at train.py:88 for 10 min, while ranks 0, 1 wait for it in all_reduce #5 of default_pg"
    assert describe_loop(busy, where, 600.0) == expected
