"""Tests of what counts as a stall, and what only looks like one."""

import pytest
from msgspec.structs import replace

from ddplaunch.observe.diagnosis.inspection import (
    Collective,
    Frame,
    Group,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
)
from ddplaunch.observe.diagnosis.rank_position import GLOO_TEARDOWN
from ddplaunch.observe.diagnosis.stall_check import (
    MIN_BUSY_CPUS,
    MIN_NETWORK_BYTES,
    MIN_TRAFFIC_BYTES,
    check_stall,
    describe_activity,
    describe_locations,
)

TIMEOUT = 300.0
AT = Frame("load_batch", "data.py", 31, own=True)


def rank(number: int, entered: int, completed: int = 4, **fields: object) -> RankInspection:
    """A rank that has not moved for ten minutes."""
    states = (GroupState("0", entered, completed),)
    known = RankInspection(
        number,
        "n0",
        100 + number,
        ProcessCondition.ALIVE,
        threads=(Thread((AT,)),),
        answers=True,
        groups=states,
        quiet=600.0,
        standstill=600.0,
        busy=0.0,
        traffic=0.0,
    )
    if entered > completed:
        known = replace(known, last=(Collective("0", entered, "all_reduce", "float32[6]", 1800.0, 0.0, False, True),))
    return replace(known, **fields)  # type: ignore[arg-type]


def found(*ranks: RankInspection, **fields: object) -> Inspection:
    return Inspection(0.0, ranks, len(ranks), **fields)  # type: ignore[arg-type]


WAITING = rank(0, 5), rank(1, 5)


def stalled(*ranks: RankInspection, strict: bool = False):
    """The stall of these ranks, or None."""
    return check_stall(found(*ranks), TIMEOUT, strict=strict).stall


def test_ranks_that_wait_for_an_idle_rank_are_a_stall():
    stall = stalled(*WAITING, rank(2, 4))
    assert (stall.rank, stall.is_alive, stall.killable, stall.seconds) == (2, True, True, 600.0)
    assert "rank 2 has not entered it: load_batch at data.py:31" in stall.text
    assert stall.trace == '  File "data.py", line 31, in load_batch'


def in_group(group: Group, number: int, entered: int) -> RankInspection:
    """A rank that uses one group only, and waits in its collective 5 if it has entered that."""
    waits = (Collective(group.group, 5, "all_reduce", "", 1800.0, 0.0, False, True),) if entered == 5 else ()
    return rank(number, entered, groups=(GroupState(group.group, entered, 4),), known=(group,), last=waits)


def test_the_stalled_rank_is_the_one_in_the_text_if_two_groups_wait():
    pair, trio = Group("1", "pair", (0, 1)), Group("2", "trio", (2, 3, 4))
    ranks = in_group(pair, 0, 4), in_group(pair, 1, 5), in_group(trio, 2, 4), in_group(trio, 3, 5), in_group(trio, 4, 5)
    stall = stalled(*ranks)
    assert stall.text.startswith("ranks 3, 4 wait in all_reduce #5 of trio")
    assert stall.rank == 2


def test_without_a_recorder_the_rank_behind_is_the_culprit():
    """The stacks of DDP on gloo up to torch 2.9 do not show that backward waits."""
    ranks = [rank(number, entered, entered, answers=None) for number, entered in enumerate((12, 12, 11))]
    stall = stalled(*ranks, strict=True)
    assert stall.rank == 2
    assert stall.text == (
        "all ranks are idle, and rank 2 has begun 11 operations of one group (load_batch at data.py:31), "
        "ranks 0, 1 have begun 12"
    )


@pytest.mark.parametrize(
    "third",
    [
        rank(2, 11, 11),  # its recorder shows that it does not wait
        rank(2, 11, 11, answers=None, condition=ProcessCondition.EXITED, code=0),
        rank(2, 11, 11, answers=None, threads=(Thread(()),)),  # its program is over
    ],
)
def test_a_rank_behind_that_answers_or_has_ended_is_not_the_culprit(third):
    answers = third.answers
    stall = stalled(*(rank(n, 12, 12, answers=answers) for n in (0, 1)), third, strict=True)
    assert (stall.rank, stall.text.partition(":")[0]) == (0, "all ranks are idle")


@pytest.mark.parametrize(
    ("awaited", "expected"),
    [
        (rank(2, 4, busy=MIN_BUSY_CPUS), False),  # a long validation
        (rank(2, 4, traffic=float(MIN_TRAFFIC_BYTES)), False),  # a slow checkpoint
        (rank(2, 4, network=float(MIN_NETWORK_BYTES)), False),  # a slow upload
        (rank(2, 4, busy=None, traffic=None), False),  # nothing is known of it
        (rank(2, 4, busy=MIN_BUSY_CPUS / 2, traffic=MIN_TRAFFIC_BYTES / 2), True),
        (rank(2, 4, condition=ProcessCondition.STOPPED, busy=1.0), True),
        (rank(2, 4, condition=ProcessCondition.EXITED, code=0, busy=None), True),
        (rank(2, 4, condition=ProcessCondition.PENDING, groups=(), threads=(), answers=None), False),
        (rank(2, 4, moved=True), False),
        (rank(2, 4, quiet=10.0), False),  # it prints
        (rank(2, 4, quiet=None), True),  # its output is not ours to see
        (rank(2, 5, busy=1.0), True),  # all have entered it, and NCCL spins
    ],
)
def test_whether_the_awaited_rank_is_idle(awaited, expected):
    assert bool(stalled(*WAITING, awaited)) is expected


def test_a_rank_in_store_wait_waits_for_all_others():
    """Rank 0 may set the key, and is busy: that is no stall."""
    in_store = rank(2, 4, awaits="store")
    assert stalled(*WAITING, in_store)
    assert not stalled(rank(0, 5, busy=MIN_BUSY_CPUS), rank(1, 5), in_store)
    waiting = [rank(number, 4, awaits="store") for number in (1, 2)]
    stall = stalled(rank(0, 4), *waiting)
    assert stall.rank == 0
    assert stall.text.startswith("ranks 1, 2 wait in store.wait, called at data.py:31; rank 0 has not set its key")


@pytest.mark.parametrize(
    ("inspection", "strict", "wait"),
    [
        (found(*(replace(each, standstill=290.0) for each in WAITING), rank(2, 4)), False, 10.0),
        (found(*WAITING, rank(2, 4, quiet=280.0)), False, 20.0),
        (found(WAITING[0], replace(WAITING[1], standstill=250.0)), False, 50.0),  # the shortest wait counts
        (found(*WAITING, rank(2, 4), silent=("node 1",)), True, None),  # a node that does not answer may work
        (found(*(rank(number, 0, 0, groups=(), answers=None) for number in range(2))), True, None),  # without torch
    ],
)
def test_a_short_wait_is_not_a_stall(inspection, strict, wait):
    assert check_stall(inspection, TIMEOUT, strict=strict) == (None, wait and pytest.approx(wait))


def test_a_blocked_rank_is_reported_as_not_killable():
    """The others may use the CPU while they wait, as with NCCL."""
    waiting = (replace(each, busy=1.0) for each in WAITING)
    assert not stalled(*waiting, rank(2, 4, condition=ProcessCondition.BLOCKED), strict=True).killable


def test_idle_ranks_are_a_stall_with_a_stall_timeout():
    idle = found(rank(0, 4), rank(1, 4))
    assert check_stall(idle, TIMEOUT, strict=False) == (None, None)
    stall = check_stall(idle, TIMEOUT, strict=True).stall
    assert stall.text == "all ranks are idle: ranks 0, 1: load_batch at data.py:31"
    assert check_stall(found(rank(0, 4), rank(1, 4, busy=0.5)), TIMEOUT, strict=True) == (None, None)
    between = {"threads": (Thread(()),), "outside": "between two calls"}
    assert not stalled(rank(0, 4, **between), rank(1, 4, **between), strict=True), "a session that is not used"


def test_a_stall_has_the_same_key_until_a_rank_moves():
    first = stalled(*WAITING, rank(2, 4))
    later = stalled(*(replace(each, standstill=900.0) for each in WAITING), rank(2, 4))
    moved = stalled(rank(0, 6, 5), rank(1, 6, 5), rank(2, 5, 5))
    assert first.progress_key == later.progress_key != moved.progress_key


def test_descriptions_of_locations_and_activity():
    elsewhere = rank(1, 4, threads=(Thread((Frame("main", "train.py", 9, own=True),)),))
    assert describe_locations([rank(0, 4)]) == "load_batch at data.py:31"
    assert describe_locations([rank(0, 4), elsewhere]) == "rank 0: load_batch at data.py:31; rank 1: main at train.py:9"
    assert describe_locations([rank(0, 4, threads=())]) == ""
    inside = Frame("destroy_process_group", "/torch/distributed/distributed_c10d.py", 1, own=False)
    leaving = rank(0, 4, threads=(Thread((inside, AT)),))
    assert describe_locations([leaving]) == "destroy_process_group at data.py:31"
    assert describe_activity(found(rank(0, 4, threads=()))) == ""
    assert describe_activity(found(rank(0, 4, condition=ProcessCondition.EXITED))) == ""
    assert describe_activity(found(rank(0, 4), rank(1, 4))) == "ranks 0, 1: load_batch at data.py:31"


def test_the_culprit_in_different_collectives_is_the_odd_rank():
    """Line and trace are those of the thread that runs the collective."""
    odd = Frame("odd", "stats.py", 8, own=True)
    inside = Frame("barrier", "/torch/distributed/distributed_c10d.py", 1, own=False)
    last = Collective("0", 5, "barrier", "", 1800.0, 0.0, False, True)
    threads = (Thread((AT,)), Thread((inside, odd)))
    stall = stalled(WAITING[0], rank(1, 5, last=(last,), threads=threads), rank(2, 5))
    assert "all_reduce on ranks 0, 2 (data.py:31) and barrier on rank 1 (stats.py:8)" in stall.text
    assert (stall.rank, stall.trace) == (1, '  File "stats.py", line 8, in odd')


def test_a_rank_in_a_deadlock_of_gloos_teardown_is_a_stall_and_named():
    """It holds the GIL, so it does not answer; all its collectives are complete."""
    deadlocked = rank(0, 4, answers=False, asleep=GLOO_TEARDOWN)
    place = "it hangs in torch's teardown of gloo, a deadlock inside torch, load_batch at data.py:31"
    stall = stalled(deadlocked, rank(1, 4, condition=ProcessCondition.EXITED, code=0))
    assert (stall.rank, stall.text, stall.only_looks_idle) == (0, f"rank 0: {place}", False)
    assert stalled(deadlocked, rank(1, 5)).text.endswith(f"rank 0 has not entered it: {place}")
    assert stalled(replace(deadlocked, answers=True)) is None  # without the GIL, the teardown waits for its last work
    assert stalled(replace(deadlocked, busy=2 * MIN_BUSY_CPUS)) is None
