"""Tests of the sentences about ranks that wait, for recorded hangs and made-up inspections."""

import random
import time

import pytest
from msgspec.structs import replace

from ddplaunch.observe.diagnosis.culprit import find_culprit
from ddplaunch.observe.diagnosis.inspection import (
    ActiveCall,
    Collective,
    Frame,
    Group,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
    Worker,
)
from ddplaunch.observe.diagnosis.rank_position import may_wait_for_thread
from ddplaunch.observe.diagnosis.stack_groups import group_ranks, rank_states
from ddplaunch.observe.diagnosis.stall_check import describe_activity
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits
from ddplaunch.observe.diagnosis.waits import find_waits, ranks_to_query
from tests.observe.diagnosis.clauses import (
    ALL_WAIT,
    ALONE,
    CHILD_WAIT,
    COMPLETE,
    CYCLE,
    HOLDS_GIL,
    LOCK_WAIT,
    NO_SIGNAL,
    NO_WAIT,
    NOT_INSPECTED,
    ON_ITS_WAY,
)
from tests.observe.diagnosis.recorded_hangs import (
    RECORDING,
    VERSIONS,
    cheap_inspection,
    full_inspection,
    stack,
    with_collectives,
    with_rank_changed,
)
from tests.scaled_timeouts import scaled_timeout

STEP = "all_reduce #5 of default_pg (float32[6]), entered at train.py:16"
OVER = "rank 0 is ending; rank 1 has ended (exit code 0)"
LOADING = "load_batch at data.py:9"


def entered(what, line, why=LOADING):
    """The sentence if only rank 2 is missing in a collective."""
    return [f"ranks 0, 1 wait in {what}, entered at train.py:{line}; rank 2 has not entered it: {why}"]


def called(what, line, why=LOADING):
    """The same of a function, where there is no recorder."""
    return [f"ranks 0, 1 wait in {what}, called at train.py:{line}; rank 2 has not called it: {why}"]


EXPECTED = {
    "absent": entered("all_reduce #5 of default_pg (float32[6])", 16),
    "asynchronous": entered("all_reduce #6 of default_pg (float32[5])", 97),
    "broadcast": [
        "rank 0 waits in broadcast #5 of default_pg (float32[5]), entered at train.py:103, rank 1 in #6; "
        f"rank 2 has not entered it: {LOADING}"
    ],
    "chain": [
        "rank 1 waits in all_reduce #1 of tail (ranks 1, 2; float32[2, 3]), entered at train.py:81; "
        f"rank 2 has not entered it: {LOADING}",
        "rank 0 waits in all_reduce #1 of pair (ranks 0, 1; float32[2, 3]), entered at train.py:79; "
        "rank 1 has not entered it: it waits in all_reduce #1 of tail, chain at train.py:81",
    ],
    "circle": [
        f"ranks 1, 2 wait in {STEP}; rank 0 has not entered it: it waits in all_reduce #1 of pair, "
        f"circle at train.py:87; {CYCLE}: 0 → 1 → 0",
        "rank 0 waits in all_reduce #1 of pair (ranks 0, 1; float32[2, 3]), entered at train.py:87; "
        "rank 1 has not entered it: it waits in all_reduce #5 of default_pg, step at train.py:16",
    ],
    "coalesced": entered("all_reduce #5 of default_pg (float32[2, 0], float32[2, 1] and 4 more)", 135),
    "ddp": entered("all_reduce #12 of default_pg (float32[20])", 112),
    "fsdp": entered("all_gather #9 of default_pg (float32[20])", 123),
    "gil": [f"ranks 0, 1 wait in {STEP}; rank 2 {HOLDS_GIL}: hold at data.py:13"],
    "loader": entered(
        "all_reduce #5 of default_pg (float32[6])", 16, "it waits for its DataLoader, loader at data.py:37"
    ),
    "lock": entered("all_reduce #5 of default_pg (float32[6])", 16, "again at data.py:22"),
    "mismatch": [
        f"#5 of default_pg is all_reduce on ranks 0, 1 (train.py:16) and all_gather on rank 2 (train.py:45): {CYCLE}"
    ],
    "monitored_barrier": called("monitored_barrier", 141),
    "no_init": called("init_process_group", 152),
    "objects": entered("all_gather #5 of default_pg (int64[1])", 129),
    "point_to_point": [
        f"rank 1 waits in recv from rank 2, called at train.py:63; rank 2 does not send: {LOADING}",
        "rank 0 waits in all_reduce #6 of default_pg (float32[6]), entered at train.py:16; "
        f"rank 2 has not entered it: {LOADING}; "
        "rank 1 has not entered it: it waits in recv from rank 2, point_to_point at train.py:63",
    ],
    "ran_longer": [f"rank 2 waits in {STEP}, {ALONE}; {OVER}"],
    "subgroup": [
        "rank 0 waits in all_reduce #1 of pair (ranks 0, 1; float32[2, 3]), entered at train.py:71; "
        f"rank 1 has not entered it: {LOADING}",
        f"rank 2 waits in {STEP}; rank 1 has not entered it: {LOADING}; "
        "rank 0 has not entered it: it waits in all_reduce #1 of pair, subgroup at train.py:71",
    ],
}
"""By the kind of hang, with torch's recorder."""

BEGUN = "no rank is known to wait, but rank 2 has begun {} operations of one group ({}), ranks 0, 1 have begun {}"
WITHOUT_RECORDER = {
    "absent": called("all_reduce", 16),
    "asynchronous": [BEGUN.format(5, LOADING, 7)],
    "broadcast": [
        f"rank 0 waits in broadcast, called at train.py:103; rank 2 has not called it: {LOADING}",
        f"rank 1 waits in all_reduce, called at train.py:16; rank 2 has not called it: {LOADING}",
    ],
    "chain": called("all_reduce", "79, train.py:81"),
    "circle": [
        "ranks 0 to 2 wait in all_reduce, called at train.py:87, train.py:16; "
        f"all ranks are in it: {ON_ITS_WAY}, or their groups differ"
    ],
    "coalesced": called("all_reduce_coalesced", 135),
    "ddp": [BEGUN.format(11, LOADING, 12)],
    "fsdp": called("all_gather_into_tensor", 123),
    "gil": [f"ranks 0, 1 wait in all_reduce, called at train.py:16; rank 2 {HOLDS_GIL}: hold at data.py:13"],
    "loader": called("all_reduce", 16, "it waits for its DataLoader, loader at data.py:37"),
    "lock": called("all_reduce", 16, "again at data.py:22"),
    "mismatch": [
        f"ranks 0, 1 wait in all_reduce, called at train.py:16; {ALL_WAIT}",
        f"rank 2 waits in all_gather, called at train.py:45; {ALL_WAIT}",
    ],
    "monitored_barrier": EXPECTED["monitored_barrier"],
    "no_init": EXPECTED["no_init"],
    "objects": called("all_gather_object", 129),
    "point_to_point": [
        f"rank 0 waits in all_reduce, called at train.py:16; rank 2 has not called it: {LOADING}",
        f"rank 1 waits in recv from rank 2, called at train.py:63; rank 2 does not send: {LOADING}",
    ],
    "ran_longer": [f"rank 2 waits in all_reduce, called at train.py:16, which no other rank has called; {OVER}"],
    "subgroup": [
        f"ranks 0, 2 wait in all_reduce, called at train.py:71, train.py:16; rank 1 has not called it: {LOADING}"
    ],
}
"""By the kind of hang, with a torch that does not record gloo's collectives: by stacks, and how much each has begun."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", EXPECTED)
def test_sentences_of_recorded_hangs(kind, version):
    expected = EXPECTED if version in RECORDING else WITHOUT_RECORDER
    assert list(describe_waits(full_inspection(kind, version))) == expected[kind]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"condition": ProcessCondition.STOPPED, "answers": None}, "rank 2 is stopped (SIGSTOP)"),
        ({"condition": ProcessCondition.EXITED, "code": 0}, "rank 2 has ended (exit code 0)"),
        ({"condition": ProcessCondition.EXITED, "code": -9}, "rank 2 has ended (SIGKILL)"),
        ({"condition": ProcessCondition.EXITED, "code": -40}, "rank 2 has ended (signal 40)"),
        ({"condition": ProcessCondition.EXITED}, "rank 2 has ended"),
        ({"condition": ProcessCondition.PENDING}, "rank 2 has not started"),
        ({"condition": ProcessCondition.REPLACED}, "rank 2 has become another program"),
        ({"answers": False}, f"rank 2 {HOLDS_GIL}"),
        ({"threads": (Thread(()),)}, "rank 2 is ending"),
        ({"threads": (Thread(()),), "outside": "between two calls", "answers": True}, "rank 2 is between two calls"),
        ({"threads": (Thread(()), *stack("log at a.py:1")), "outside": "between two calls"},
         "rank 2 is between two calls"),
    ],
)  # fmt: skip
def test_a_missing_rank_without_a_stack(fields, text):
    gone = with_rank_changed(cheap_inspection("absent"), 2, **{"threads": (), "groups": (), "answers": None, **fields})
    assert describe_waits(with_collectives(gone, "absent")) == (f"ranks 0, 1 wait in {STEP}; {text}",)


def rank(number, entered, completed, *frames, **fields):
    return RankInspection(
        number,
        fields.pop("host", "here"),
        100 + number,
        ProcessCondition.ALIVE,
        **{"threads": stack(*frames), "answers": True, "groups": (GroupState("0", entered, completed),), **fields},
    )


def together(*ranks, **fields):
    return Inspection(0.0, ranks, fields.pop("world_size", len(ranks)), **fields)


PACKAGES = "/venv/lib/python3/site-packages"
WAITING = ("all_reduce", "step at train.py:3")


def collective(number, operation="all_reduce", tensors="float32[6]", completed=False, group="0"):
    return Collective(group, number, operation, tensors, 600.0, 0.0, completed, True)


def calls(number, function, other, **fields):
    """A rank in send, recv or the like, that names another."""
    inside = ActiveCall(function, function.removesuffix("_object_list"), other)
    fields = {"inside": inside, "answers": True, "groups": (), **fields}
    return rank(number, 0, 0, function, f"step at ring.py:{number}", **fields)


def absent(number, **fields):
    """The recorded hang in which rank 2 is absent, with other facts of one rank."""
    return with_rank_changed(full_inspection("absent"), number, **fields)


def begins(number, given, world_size):
    """A rank in init_process_group, called with this rank and world size."""
    inside = ActiveCall("init_process_group", "init_process_group", given, world_size=world_size)
    return rank(number, 0, 0, "init_process_group", "setup at train.py:3", answers=None, groups=(), inside=inside)


MAKES_GROUP = rank(
    1, 4, 4, "new_group", "make at train.py:8", inside=ActiveCall("new_group", "new_group", None, (1, 2))
)
IN_STORE = ActiveCall("wait", "store.wait", None)
LOADS = rank(1, 4, 4, "load at train.py:9", workers=(Worker(4711, stopped=True),))
DATALOADER = (Frame("_next_data", "/venv/lib/python3/site-packages/torch/utils/data/dataloader.py", 1, False),)
STATE_7, GROUP_7 = (GroupState("7", 1, 0),), (Group("7", "undefined", (0, 1)),)

SENTENCES = {
    "a rank that has left its process group": (
        absent(2, answers=None, groups=(), last=(), known=()),
        f"ranks 0, 1 wait in {STEP}; rank 2 has not entered it: {LOADING}"),
    "a rank that has just moved is not awaited": (
        absent(2, moved=True), f"ranks 0, 1 wait in {STEP}; rank 2 makes progress"),
    "one of which nothing is known may be in the call too": (
        together(rank(0, 8, 7, *WAITING), rank(1, 7, 7, "f at a.py:1"),
                 replace(rank(2, 0, 0, answers=False, groups=()), threads=())),
        "rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3; rank 1 has not entered it: f at a.py:1; "
        f"rank 2 {HOLDS_GIL}"),
    "one that does not respond in a call may have entered it": (
        absent(2, threads=stack(*WAITING), groups=(), last=(), answers=False),
        f"ranks 0, 1 wait in {STEP}; rank 2 {HOLDS_GIL}"),
    "without a number, one that moves does not wait": (
        together(calls(0, "recv", None), calls(1, "recv", None), rank(2, 7, 7, "f at a.py:1", moved=True)),
        "ranks 0, 1 wait in recv, called at ring.py:0, ring.py:1; rank 2 makes progress"),
    "without a number, one that cannot be asked may wait": (
        together(calls(0, "recv", None), calls(1, "recv", 2), replace(LOADS, rank=2, threads=(), no_stack=NO_SIGNAL)),
        "rank 0 waits in recv, called at ring.py:0; not all ranks could be inspected",
        "rank 1 waits in recv from rank 2, called at ring.py:1; not all ranks could be inspected"),
    "two that are missing for different reasons": (
        absent(1, threads=stack("save at train.py:7"), groups=(GroupState("0", 4, 4),)),
        f"rank 0 waits in {STEP}, {ALONE}; rank 1 has not entered it: save at train.py:7; "
        f"rank 2 has not entered it: {LOADING}"),
    "a rank in the kernel": (
        absent(2, condition=ProcessCondition.BLOCKED),
        f"ranks 0, 1 wait in {STEP}; rank 2 has not entered it: it is blocked in the kernel, by a disk or a driver, "
        f"{LOADING}"),
    "a rank that cannot be asked may have entered it": (
        absent(2, threads=(), groups=(), last=(), answers=None, no_stack=NO_SIGNAL),
        f"ranks 0, 1 wait in {STEP}; {NOT_INSPECTED}"),
    "one that waits in a call, and reports no progress, may have entered it": (
        absent(2, threads=stack(*WAITING), groups=(), last=(), answers=None),
        f"ranks 0, 1 wait in {STEP}; {NOT_INSPECTED}",
        f"rank 2 waits in all_reduce, called at train.py:3; {ALL_WAIT}"),
    "a rank that was not asked has not ended": (
        Inspection(0.0, (), 3, silent=("node 0",)), "the state of the ranks is unknown"),
    "a rank that has completed what others wait in": (
        together(rank(0, 8, 7, *WAITING), rank(1, 8, 8, "save at a.py:2"), rank(2, 7, 7, "load at data.py:2")),
        "rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3; "
        "rank 2 has not entered it: load at data.py:2"),
    "all have ended": (
        together(RankInspection(0, "here", 1, ProcessCondition.EXITED, code=0)), "all ranks have ended"),
    "on gloo, whose threads write it, what is completed may be late": (
        together(rank(0, 8, 7, *WAITING), rank(1, 7, 5, "load at data.py:2")),
        "rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3; "
        "rank 1 has not entered it: load at data.py:2"),
    "late for ranks that do not wait": (
        together(rank(0, 8, 6, "f at a.py:1"), rank(1, 8, 7, "f at a.py:1")), NO_WAIT),
    "tensors that do not fit": (
        together(*(rank(n, 8, 7, *WAITING, last=(collective(8, tensors=f"float32[{6 + (n == 2)}]"),))
                   for n in range(3))),
        "#8 of default_pg is all_reduce of float32[6] on ranks 0, 1 (train.py:3) and all_reduce of float32[7] on "
        f"rank 2 (train.py:3): {CYCLE}"),
    "tensors that may differ": (
        together(*(rank(n, 8, 7, *WAITING, last=(collective(8, "scatter", f"float32[{n}]"),)) for n in range(2))),
        f"ranks 0, 1 wait in scatter #8 of default_pg (float32[0]), entered at train.py:3; {COMPLETE}"),
    "the rest of a group is elsewhere": (
        together(rank(0, 8, 7, *WAITING), world_size=2, node_only=True),
        f"rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3; {NOT_INSPECTED}"),
    "a group without a description has its number": (
        together(rank(0, 0, 0, *WAITING, groups=STATE_7, known=GROUP_7, last=(collective(1, group="7"),)),
                 rank(1, 0, 0, "f at a.py:1", groups=())),
        "rank 0 waits in all_reduce #1 of group 7 (ranks 0, 1; float32[6]), entered at train.py:3; "
        "rank 1 has not entered it: f at a.py:1"),
    "all are in init_process_group": (
        together(*(rank(n, 0, 0, "init_process_group", "setup at train.py:3", answers=None, groups=())
                   for n in range(2))),
        "ranks 0, 1 wait in init_process_group, called at train.py:3; all ranks have called it: they are connecting, "
        "or cannot reach each other"),
    "a world size that is not the job's": (
        together(begins(0, 0, 3), begins(1, 1, 3)),
        "ranks 0, 1 wait in init_process_group, called at train.py:3; it was called with world_size=3, but the job has "
        "2 ranks"),
    "one of two world sizes": (
        together(begins(0, 0, 2), begins(1, 1, 4)),
        "ranks 0, 1 wait in init_process_group, called at train.py:3; it was called with world_size=4 on rank 1, but "
        "the job has 2 ranks"),
    "a rank that was given twice": (
        together(begins(0, 0, 3), begins(1, 1, 3), begins(2, 1, 3)),
        "ranks 0 to 2 wait in init_process_group, called at train.py:3; ranks 1, 2 called it with rank=1"),
    "one that cannot be asked may not have called it": (
        together(begins(0, 0, 2), replace(LOADS, answers=None, groups=(), threads=(), no_stack=NO_SIGNAL)),
        "rank 0 waits in init_process_group, called at train.py:3; not all ranks could be inspected"),
    "one that receives from ranks which wait for it": (
        together(rank(0, 8, 7, *WAITING), rank(1, 8, 7, *WAITING), rank(2, 7, 7, "recv", "get at train.py:5")),
        f"rank 2 waits in recv, called at train.py:5; {ALL_WAIT}",
        "ranks 0, 1 wait in all_reduce #8 of default_pg, entered at train.py:3; "
        "rank 2 has not entered it: it waits in recv, get at train.py:5"),
    "a rank that waits for a cycle is not in it": (
        together(calls(0, "recv", 1), calls(1, "recv", 0), calls(2, "recv", 0), calls(3, "send", 2)),
        "ranks 0 to 2 wait in recv (0 from 1, 1 from 0, 2 from 0), called at ring.py:0, ring.py:1, ring.py:2; "
        f"{CYCLE}: 0 → 1 → 0",
        "rank 3 waits in send to rank 2, called at ring.py:3; "
        "rank 2 does not receive: it waits in recv from rank 0, step at ring.py:2"),
    "a missing stage of a pipeline": (
        together(calls(0, "send", 1), rank(1, 0, 0, "load at data.py:2", groups=()), calls(2, "recv", 1),
                 calls(3, "recv", 2)),
        "ranks 2, 3 wait in recv (2 from 1, 3 from 2), called at ring.py:2, ring.py:3; "
        "rank 1 does not send: load at data.py:2",
        "rank 0 waits in send to rank 1, called at ring.py:0; rank 1 does not receive: load at data.py:2"),
    "a cycle of a recv and a collective": (
        together(rank(0, 8, 7, *WAITING), calls(1, "recv", 0, groups=(GroupState("0", 7, 7),))),
        "rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3; rank 1 has not entered it: it waits in "
        f"recv from rank 0, step at ring.py:1; {CYCLE}: 0 → 1 → 0",
        "rank 1 waits in recv from rank 0, called at ring.py:1; rank 0 does not send: it waits in "
        "all_reduce #8 of default_pg, step at train.py:3"),
    "a rank that did not call new_group comes first": (
        together(rank(0, 5, 4, *WAITING), MAKES_GROUP, rank(2, 5, 4, *WAITING)),
        "rank 1 waits in new_group (ranks 1, 2), called at train.py:8; rank 2 has not called it: it waits in "
        f"all_reduce #5 of default_pg, step at train.py:3; {CYCLE}: 1 → 2 → 1",
        "ranks 0, 2 wait in all_reduce #5 of default_pg, entered at train.py:3; rank 1 has not entered it: it waits "
        "in new_group, make at train.py:8"),
    "a store of the program": (
        together(rank(0, 8, 7, *WAITING), rank(1, 7, 7, "wait_for_trainer at train.py:8", inside=IN_STORE,
                                               asleep="asleep")),
        f"rank 1 waits in store.wait, called at train.py:8; {ALL_WAIT}",
        "rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3; rank 1 has not entered it: it waits in "
        "store.wait, wait_for_trainer at train.py:8"),
    "all wait for keys of a store": (
        together(*(rank(n, 7, 7, "sync at train.py:8", inside=replace(IN_STORE, key=key), awaits="store")
                   for n, key in enumerate(("epoch/1", "", "epoch/1", "epoch/2")))),
        "ranks 0 to 3 wait in store.wait (epoch/1, epoch/2), called at train.py:8; all ranks wait for a key that none "
        "has set"),
    "some wait for a key of a store": (
        together(*(rank(n, 7, 7, "sync at train.py:8", inside=replace(IN_STORE, key="epoch/1")) for n in range(2)),
                 rank(2, 7, 7, "save at train.py:3")),
        "ranks 0, 1 wait in store.wait (epoch/1), called at train.py:8; rank 2 has not set its key: "
        "save at train.py:3"),
    "a stopped worker": (
        together(rank(0, 5, 4, *WAITING), replace(LOADS, threads=(Thread((*DATALOADER, *LOADS.threads[0].frames)),))),
        "rank 0 waits in all_reduce #5 of default_pg, entered at train.py:3; rank 1 has not entered it: it waits for "
        "its DataLoader, load at train.py:9 (worker pid 4711 is stopped (SIGSTOP))"),
    "the program of one has ended, its process has not": (
        together(RankInspection(0, "here", 1, ProcessCondition.EXITED, code=0), rank(1, 4, 4, threads=(Thread(()),))),
        "all ranks have ended or are ending"),
    "all make progress": (
        together(*(rank(n, 8, 7, *WAITING, moved=True) for n in range(4))),
        f"{NO_WAIT}: 4 of 4 have completed collectives in the last 0.1 s"),
    "many ranks in a line": (
        together(*(rank(n, 7, 7, "load at data.py:2") if n in (7, 40) else rank(n, 8, 7, *WAITING) for n in range(64))),
        "ranks 0 to 6, 8 to 39 and 41 to 63 wait in all_reduce #8 of default_pg, entered at train.py:3; "
        "ranks 7, 40 have not entered it: load at data.py:2"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences(name):
    inspection, *sentences = SENTENCES[name]
    assert describe_waits(inspection) == tuple(sentences)


def test_many_reasons_are_bounded():
    ranks = [rank(0, 8, 7, *WAITING), rank(1, 8, 7, *WAITING)]
    ranks += [rank(n, 7, 7, f"load at data.py:{n}") for n in range(2, 30)]
    (text,) = describe_waits(together(*ranks))
    assert text.count("load at") == 3
    assert text.endswith("; ranks 5 to 29 too")


@pytest.mark.slow
def test_the_time_for_many_groups():
    """A job of 4,000 groups, each used once, is analysed in a second."""
    groups = [str(number) for number in range(4000)]
    states = tuple(GroupState(each, 1, 1) for each in groups)
    known = tuple(Group(each, "", (0, 1, 2)) for each in groups)
    late = (GroupState("0", 0, 0), *states[1:])
    last = tuple(Collective(each, 1, "all_reduce", "", 600.0, 0.0, each != "0", True) for each in groups)
    found = [
        RankInspection(number, "here", 100 + number, ProcessCondition.ALIVE, answers=True, known=known, groups=entered)
        for number, entered in enumerate(((GroupState("0", 1, 0), *states[1:]), states, late))
    ]
    found[0] = replace(found[0], last=last)
    began = time.process_time()
    ranks_to_query(together(*found))
    assert len(describe_waits(together(*found))) == 1
    assert time.process_time() - began < scaled_timeout(1)


def test_ranks_whose_collectives_are_queried():
    assert ranks_to_query(together(*(rank(n, 8, 7, *WAITING, moved=True) for n in range(4)))) == ()
    alike = together(*(rank(n, 8, 7, *WAITING) for n in range(4)))
    assert ranks_to_query(alike) == (0,)
    ranks = list(alike.ranks)
    ranks[0] = replace(ranks[0], last=(collective(8),), known=(Group("0", "default_pg", (0, 1, 2, 3)),))
    assert ranks_to_query(together(*ranks)) == (1, 2, 3)  # it waits, and no rank is missing
    ranks[0] = replace(ranks[0], last=(collective(8, completed=True),))
    assert ranks_to_query(together(*ranks)) == ()  # it does not, so those at the same place neither
    many = [rank(n, 8, 7, "all_reduce", f"step at train.py:{n}") for n in range(8)]
    assert ranks_to_query(together(*many, rank(8, 7, 7, "f at a.py:1"))) == (0, 1, 2, 3)  # at first
    first = cheap_inspection("point_to_point")
    assert ranks_to_query(first) == (0,)  # whose sends make the numbers of all doubtful
    one = replace(first, ranks=(full_inspection("point_to_point").ranks[0], *first.ranks[1:]))
    assert ranks_to_query(one) == (1, 2)


def test_a_cycle_names_its_ranks_in_order():
    """In a mesh of 2 by 2, two ranks are in their rows, and two in their columns."""
    rows, columns = ("1", "2"), ("3", "4")
    members = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    known = tuple(Group(name, "row" if name in rows else "column", each) for name, each in members.items())
    waits_in = {0: "1", 1: "4", 3: "2", 2: "3"}
    assert {*rows, *columns} == set(waits_in.values())
    found = together(
        *(
            rank(n, 0, 0, *WAITING, groups=(GroupState(group, 1, 0),), known=known, last=(collective(1, group=group),))
            for n, group in sorted(waits_in.items())
        )
    )
    first, *others = describe_waits(found)
    assert first.endswith(f"; {CYCLE}: 0 → 1 → 3 → 2 → 0")
    assert len(others) == 3
    assert not any("each other" in each for each in others)
    blamed = find_culprit(found)
    assert blamed.ranks == (0, 1, 2, 3)
    assert blamed.text == (
        "ranks 0 to 3 waited for each other, 0 → 1 → 3 → 2 → 0: rank 0 in all_reduce #1 of row, "
        "rank 1 in all_reduce #1 of column, rank 3 in all_reduce #1 of row, rank 2 in all_reduce #1 of column"
    )


@pytest.mark.parametrize("size", [3, 64])
def test_a_ring_of_sends(size):
    ring = together(*(calls(number, "send", (number + 1) % size) for number in range(size)))
    (text,) = describe_waits(ring)
    arrows = "0 → 1 → 2 → 0" if size == 3 else "0 → 1 → 2 → 3 → 4 → 5 → 6 → … → 63 → 0"
    assert text.endswith(f"; {CYCLE}: {arrows}")
    blame = f"ranks 0 to {size - 1} waited for each other, {arrows}: ranks 0 to {size - 1} in send"
    assert find_culprit(ring).text == blame


def test_a_send_and_its_recv():
    found = together(calls(0, "send", 1), calls(1, "recv", 0))
    assert describe_waits(found) == (
        "rank 0 waits in send to rank 1, called at ring.py:0; "
        f"rank 1 receives from it: {ON_ITS_WAY}, or the tags differ",
        f"rank 1 waits in recv from rank 0, called at ring.py:1; rank 0 sends to it: {ON_ITS_WAY}, or the tags differ",
    )
    assert find_culprit(found) is None


def test_broadcasts_with_different_roots():
    def one(number, root):
        inside = ActiveCall("broadcast_object_list", "broadcast", root)
        return rank(number, 8, 7, *WAITING, last=(collective(8, "broadcast"),), inside=inside)

    found = together(one(0, 0), one(1, 1), one(2, 0))
    assert describe_waits(found) == (
        "#8 of default_pg is broadcast from rank 0 on ranks 0, 2 (train.py:3) and broadcast from rank 1 on rank 1 "
        f"(train.py:3): {CYCLE}",
    )
    assert find_culprit(found).ranks == (1,)
    same = together(one(0, 0), one(1, 0))
    assert COMPLETE in describe_waits(same)[0]
    other = replace(one(1, 3), inside=ActiveCall("send", "send", 3))
    assert COMPLETE in describe_waits(together(one(0, 0), other))[0]


def test_without_a_recorder_stacks_are_compared():
    ranks = [rank(n, 0, 0, *WAITING, groups=()) for n in range(2)]
    off = together(*ranks, rank(2, 0, 0, "load at data.py:2", groups=()))
    assert describe_waits(off) == (
        "ranks 0, 1 wait in all_reduce, called at train.py:3; rank 2 has not called it: load at data.py:2",
    )
    assert describe_waits(together(*(replace(each, moved=True) for each in off.ranks)))[0].startswith("no rank waits")


def test_a_rank_that_serializes_objects_has_not_entered_the_collective():
    packs = rank(1, 7, 7, "__reduce__ at data.py:2", "_object_to_tensor", "all_gather_object", "f at a.py:1")
    found = together(rank(0, 8, 7, *WAITING), packs)
    assert describe_waits(found)[0].endswith("rank 1 has not entered it: __reduce__ at data.py:2")
    assert rank_states(found)[1] == "running"
    assert "f at a.py:1" not in describe_waits(together(replace(packs, answers=None, groups=())))[0]


def in_library(number, *functions, line="train.py:3", **fields):
    """A rank whose user code is one line, and that is in these functions of a library, the innermost first."""
    frames = [Frame(each, f"/venv/lib/python3/site-packages/lab/{each}.py", 7, False) for each in functions]
    own = stack(f"<module> at {line}")[0].frames
    return replace(rank(number, 7, 7), threads=(Thread((*frames, *own)),), **fields)


def test_ranks_that_differ_inside_a_library():
    waits = in_library(0, "step", "train", groups=(GroupState("0", 8, 7),))
    waits = replace(waits, threads=(Thread((stack("all_reduce")[0].frames[0], *waits.threads[0].frames)),))
    ranks = [waits, in_library(1, "fetch", "download", "train"), in_library(2, "tokenise", "train")]
    found = together(*ranks, in_library(3, "read", "download", "train"))
    assert describe_waits(found) == (
        f"rank 0 waits in all_reduce #8 of default_pg, entered at train.py:3, {ALONE}; "
        "ranks 1, 3 have not entered it: train.py:3, in download at lab/download.py:7; "
        "rank 2 has not entered it: train.py:3, in tokenise at lab/tokenise.py:7",
    )
    assert [each.ranks for each in group_ranks(found)] == [(0,), (1,), (2,), (3,)]
    assert find_culprit(found).text == (
        "ranks 1 to 3 did not enter all_reduce #8, which 1 rank waited for: "
        "ranks 1, 3 train.py:3, in download at lab/download.py:7, rank 2 train.py:3, in tokenise at lab/tokenise.py:7"
    )
    idle = together(*(replace(each, groups=(GroupState("0", 7, 7),)) for each in found.ranks[1:3]))
    assert describe_activity(idle) == (
        "rank 1: train.py:3, in download at lab/download.py:7; rank 2: train.py:3, in tokenise at lab/tokenise.py:7"
    )


def test_functions_of_libraries_are_named_only_to_distinguish_ranks():
    ranks = [rank(0, 8, 7, *WAITING), in_library(1, "download", "train"), in_library(2, "read", line="train.py:9")]
    assert "in download" not in describe_waits(together(*ranks))[0]
    alike = [rank(0, 8, 7, *WAITING), *(in_library(n, "download", "train") for n in (1, 2))]
    assert describe_waits(together(*alike))[0].endswith("; ranks 1, 2 have not entered it: train.py:3")


@pytest.mark.parametrize(
    ("called", "state"),
    [
        ("poll at /usr/lib/python3.11/multiprocessing/popen_fork.py:27", CHILD_WAIT),
        (
            "wait at /usr/lib/python3.11/threading.py:1, get at /usr/lib/python3.11/queue.py:2",
            "waits for a queue to fill",
        ),
        ("wait at /venv/lib/python3/site-packages/torch/utils/file_baton.py:44", LOCK_WAIT),
        ("put at /usr/lib/python3.11/multiprocessing/queues.py:88", "waits for space in a queue"),
        ("__enter__ at /usr/lib/python3.11/multiprocessing/synchronize.py:95", "waits for a lock"),
        ("get at /usr/lib/python3.11/asyncio/queues.py:158", "waits for a queue to fill"),
        ("wait at /usr/lib/python3.11/asyncio/locks.py:213", "waits for another task"),
        ("acquire at /usr/lib/python3.11/asyncio/locks.py:120", "waits for a lock"),
        (f"acquire at {PACKAGES}/filelock/_api.py:1", LOCK_WAIT),
        (
            f"_poll at {PACKAGES}/filelock/_core/_acquire.py:177, acquire at {PACKAGES}/filelock/_core/_lock.py:9",
            LOCK_WAIT,
        ),
        (f"acquire at {PACKAGES}/portalocker/utils.py:745", LOCK_WAIT),
        (f"_release at {PACKAGES}/filelock/_core/_lock.py:9", "running"),
        (f"acquire at {PACKAGES}/lab/filelock.py:9", "running"),
        ("rpc_sync at /venv/lib/python3/site-packages/torch/distributed/rpc/api.py:842", "waits for an RPC"),
    ],
)
def test_waits_outside_process_groups(called, state):
    *inside, line = stack(*called.split(", "), "f at a.py:1")[0].frames
    frames = [*(replace(frame, own=False) for frame in inside), line]
    one = replace(rank(0, 1, 1), threads=(Thread(tuple(frames)),))
    assert rank_states(together(one)) == {0: state}


@pytest.mark.parametrize(
    ("called", "wait"),
    [
        ("join at /usr/lib/python3.11/threading.py:1119", "it waits for a thread to end"),
        ("result at /usr/lib/python3.11/concurrent/futures/_base.py:451", "it waits for a result of its executor"),
        ("get at /usr/lib/python3.11/queue.py:171", "it waits for a queue to fill"),
    ],
)
def test_a_rank_that_waits_for_its_thread_shows_what_that_does(called, wait):
    inside, line = stack(called, "save at train.py:9")[0].frames
    threads = [Thread((replace(inside, own=False), line)), *stack("upload at hub.py:31"), *stack("upload at hub.py:31")]
    found = together(rank(0, 8, 7, *WAITING), replace(rank(1, 7, 7), threads=tuple(threads)))
    place = "save at train.py:9 (another thread: upload at hub.py:31)"
    assert describe_waits(found)[0].endswith(f"rank 1 has not entered it: {wait}, {place}")


def test_a_rank_that_waits_for_its_thread_shows_with_what_that_has_failed():
    inside, line = stack("get at /usr/lib/python3.11/queue.py:171", "save at train.py:9")[0].frames
    text = "its thread feed had failed: OSError: [Errno 5] Input/output error (read at data.py:3)"
    waits = replace(rank(1, 7, 7), threads=(Thread((replace(inside, own=False), line)),))
    assert may_wait_for_thread(waits)
    found = together(rank(0, 8, 7, *WAITING), replace(waits, thread_error=text))
    assert describe_waits(found)[0].endswith(f"it waits for a queue to fill, save at train.py:9 ({text})")


def test_a_rank_that_waits_in_asyncio_shows_what_its_other_tasks_do():
    inside, line = stack("get at /usr/lib/python3.11/asyncio/queues.py:158", "main at train.py:9")[0].frames
    threads = [Thread((replace(inside, own=False), line)), replace(stack("feed at train.py:3")[0], name="task feeder")]
    found = together(rank(0, 8, 7, *WAITING), replace(rank(1, 7, 7), threads=tuple(threads)))
    what = "it waits for a queue to fill, main at train.py:9 (another task: feed at train.py:3)"
    assert describe_waits(found)[0].endswith(f"rank 1 has not entered it: {what}")


def test_ranks_with_equal_stacks_are_one_group():
    done = replace(collective(4, completed=True), entered=9.0)
    found = group_ranks(absent(2, last=(done,)))
    assert [(each.ranks, each.state) for each in found] == [((2,), "running"), ((0, 1), "waits in all_reduce #5")]
    assert found[0].waited_s is None
    assert found[1].waited_s > 0


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        ("broadcast", ["waits in broadcast #5", "waits in all_reduce #6", "running"]),
        ("ran_longer", ["ending", "ended (exit code 0)", "waits in all_reduce #5"]),
        ("gil", ["waits in all_reduce #5"] * 2 + [HOLDS_GIL]),
        ("loader", ["waits in all_reduce #5"] * 2 + ["waits for its DataLoader"]),
        ("no_init", ["waits in init_process_group"] * 2 + ["running"]),
    ],
)
def test_the_state_of_each_rank(kind, states):
    assert list(rank_states(full_inspection(kind)).values()) == states


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"asleep": "asleep"}, "asleep"),
        ({"asleep": "waits for input"}, "waits for input"),
        ({"asleep": "asleep", "inside": ActiveCall("acquire", "lock", None)}, "waits for a lock"),
        ({"inside": ActiveCall("acquire", "lock", None)}, "running"),  # it takes locks all the time
        ({"inside": ActiveCall("wait", "wait", None)}, "waits in the wait() of isend or irecv"),
        ({"inside": ActiveCall("wait", "wait", None), "asleep": "waits for input"}, "waits for input"),
    ],
)
def test_a_rank_that_sleeps_is_not_running(fields, state):
    found = together(rank(0, 4, 4, "step at train.py:3", **fields), rank(1, 4, 4, "step at train.py:3"))
    assert rank_states(found) == {0: state, 1: "running"}


def test_any_inspection_can_be_described():
    numbers = random.Random(14)
    frames = ["all_reduce", "recv", "init_process_group", "f at a.py:1", "g at b.py:2"]
    for _ in range(1000):
        size = numbers.randrange(1, 6)
        ranks = []
        for number in range(size):
            groups = [g for g in ("0", "1", "x") if numbers.random() < 0.6]
            states = tuple(GroupState(g, numbers.randrange(4), numbers.randrange(4)) for g in groups)
            last = tuple(
                collective(numbers.randrange(4), numbers.choice("ab"), completed=numbers.random() < 0.5, group=g)
                for g in groups
            )
            ranks.append(
                replace(
                    rank(number, 1, 1, *numbers.sample(frames, numbers.randrange(4))),
                    condition=numbers.choice([ProcessCondition.ALIVE, ProcessCondition.ALIVE, *ProcessCondition]),
                    answers=numbers.choice([True, True, None, False]),
                    code=numbers.choice([None, 0, 1, -9]),
                    moved=numbers.random() < 0.2,
                    groups=states if numbers.random() < 0.8 else (),
                    last=last if numbers.random() < 0.4 else (),
                    known=(Group("1", "pair", (0, 9)),) if numbers.random() < 0.2 else (),
                    inside=ActiveCall("recv", "recv", numbers.randrange(7)) if numbers.random() < 0.6 else None,
                )
            )
        found = together(*ranks, world_size=size + numbers.randrange(2))
        assert all(describe_waits(found))
        find_culprit(found)
        assert set(ranks_to_query(found)) <= set(range(size))
        assert sorted(n for each in group_ranks(found) for n in each.ranks) == list(range(size))
        assert all(set(wait.waiting).isdisjoint(each.rank for each in wait.missing) for wait in find_waits(found))
