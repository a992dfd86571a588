"""Tests of reading torch's flight recorder: complete, of other backends, and damaged."""

import json

import pytest

from ddplaunch.observe.diagnosis.flight_recorder import (
    parse_active_call,
    parse_group_counts,
    parse_group_states,
    parse_last_collectives,
)
from ddplaunch.observe.diagnosis.inspection import (
    ActiveCall,
    Collective,
    GroupState,
    ProcessCondition,
    RankInspection,
)
from ddplaunch.observe.node.rank_reply import RankReply, add_group_states, add_last_collectives

ENTRY = {
    "collective_seq_id": 5,
    "input_dtypes": ["Float"],
    "input_sizes": [[6]],
    "is_p2p": False,
    "op_id": 5,
    "p2p_seq_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "gloo:all_reduce",
    "retired": False,
    "state": "scheduled",
    "time_created_ns": 1_795_362_254_931_786_061,
    "timeout_ms": 1_800_000,
}


def entries(*changes):
    return json.dumps({"entries": [{**ENTRY, **each} for each in changes]}).encode()


def states(**numbers):
    return json.dumps({"pg_status": {"0": numbers}}).encode()


def refuses(parse, dump):
    """Whether it raises a ValueError; any other error is the test's."""
    try:
        parse(dump)
    except ValueError:
        return True
    return False


def test_counts_of_a_group():
    dump = states(last_completed_collective="5", last_enqueued_collective="6", last_started_collective="-1")
    assert parse_group_states(dump) == (GroupState("0", 6, 5),)
    none_yet = states(last_completed_collective="-1", last_enqueued_collective="1")
    assert parse_group_states(none_yet) == (GroupState("0", 1, 0),)


@pytest.mark.parametrize("dump", [b"{}", b'{"pg_status": {}}', b'{"version": "2.10"}'])
def test_no_process_group_yet(dump):
    assert parse_group_states(dump) == parse_last_collectives(dump) == ()


def test_the_last_collective():
    assert parse_last_collectives(entries({"collective_seq_id": 4, "op_id": 4, "retired": True}, {})) == (
        Collective("0", 5, "all_reduce", "float32[6]", 1800.0, 1795362254.931786, False, True),
    )


NCCL_SEND = {"profiling_name": "nccl:send 0->1", "is_p2p": True, "op_id": 6, "p2p_seq_id": 1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # the oldest that is incomplete, and the last
        ([{"retired": True}, *({"collective_seq_id": n, "op_id": n} for n in (6, 7, 8))],
         [(6, False, True), (8, False, True)]),
        ([{"op_id": 7}], [(5, False, False)]),  # sends are counted by torch, and not here
        ([{"profiling_name": "nccl:all_reduce", "state": "completed"}, NCCL_SEND], [(5, True, True)]),
        # the second is of a new group with the name of one that was destroyed
        ([{"retired": True, "pg_id": 0}, {"collective_seq_id": 1, "op_id": 1, "pg_id": 1}], [(1, False, True)]),
    ],
)  # fmt: skip
def test_incomplete_collectives_and_sends(changes, expected):
    found = parse_last_collectives(entries(*changes))
    assert [(each.number, each.completed, each.alone) for each in found] == expected


def test_no_collectives_of_a_destroyed_group_whose_name_another_has():
    """The default group of the second ``init_process_group`` has not been used yet."""
    groups = b'[["0","default_pg",[0,1],0]]'
    reply = RankReply.parse(b"\t".join([b"1", groups, b"", entries({"retired": True})]))
    found = add_last_collectives(RankInspection(0, "here", 100, ProcessCondition.ALIVE), reply)
    assert found.last == ()


@pytest.mark.parametrize(
    ("initialised", "traces", "answers"),
    [(b"1", [states()], True), (b"0", [states()], None), (b"1", [], None)],
)
def test_a_rank_has_replied_if_it_has_a_group_and_a_recorder(initialised, traces, answers):
    reply = RankReply.parse(b"\t".join([initialised, b'[["0","default_pg",[0,1],0]]', b"", *traces]))
    found = add_group_states(RankInspection(0, "here", 100, ProcessCondition.ALIVE), reply)
    assert found.answers is answers


def test_counts_of_a_destroyed_group_whose_name_another_has():
    """Which operations of the new one are complete is unknown: all but the last."""
    counts = states(last_enqueued_collective="6", last_completed_collective="6")
    reply = RankReply.parse(b"\t".join([b"1", b'[["0","default_pg",[0,1],3]]', b"", counts]))
    found = add_group_states(RankInspection(0, "here", 100, ProcessCondition.ALIVE), reply)
    assert found.groups == (GroupState("0", 3, 2),)


@pytest.mark.parametrize(
    ("types", "sizes", "expected"),
    [
        (["Float"], [[6]], "float32[6]"),
        (["Long", "BFloat16"], [[1], [2, 3]], "int64[1], bfloat16[2, 3]"),
        (["Half"], [[]], "float16[]"),
        (["Float8_e4m3fn"], [[2]], "float8_e4m3fn[2]"),
        (["ComplexDouble"], [[2]], "complex128[2]"),
        ([], [], ""),
        (["Byte"] * 9, [[n] for n in range(9)], "uint8[0], uint8[1] and 7 more"),
        (["Bool"], [list(range(20))], "bool[0, 1, 2, 3, 4, 5, 6, 7, …]"),
    ],
)
def test_names_of_tensor_types(types, sizes, expected):
    (last,) = parse_last_collectives(entries({"input_dtypes": types, "input_sizes": sizes}))
    assert last.tensors == expected


@pytest.mark.parametrize(
    "dump",
    [
        b"", b"\xff", b"[]", b"nul", b"[" * 100_000, b'{"a":' * 100_000, b'{"pg_status": []}',
        b'{"pg_status": {"0": 1}}', *(states(last_enqueued_collective=value) for value in ("x", "9" * 5000, 1.5, True)),
        states(last_enqueued_collective=1 << 70, last_completed_collective=1),
        b'{"pg_status": {"0": {"last_enqueued_collective": ' + b"9" * 10_000 + b"}}}",
    ],
)  # fmt: skip
def test_malformed_states_are_refused(dump):
    assert refuses(parse_group_states, dump)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("collective_seq_id", [None, "x"]),
        ("op_id", [[1]]),
        ("profiling_name", [5]),
        ("process_group", [[], "0", [0, 1]]),
        ("input_sizes", [[], [5], [["x"]]]),
        ("input_dtypes", [[5]]),
        ("timeout_ms", ["long", float("nan")]),
        ("time_created_ns", [float("inf"), 10**400]),
    ],
)
def test_malformed_entries_are_refused(field, values):
    for value in values:
        assert refuses(parse_last_collectives, entries({field: value})), value


@pytest.mark.parametrize(
    "reply", [b"", b"1", b"[1]", b'[["0", "", [], "x"]]', b'[["0", "", [], Infinity]]', b"[" * 99_999]
)
def test_malformed_group_counts_are_refused(reply):
    assert refuses(parse_group_counts, reply)


def test_control_characters_in_names_are_escaped():
    (last,) = parse_last_collectives(entries({"profiling_name": "gloo:\x1b[2J" + "x" * 10_000}))
    (group,) = parse_group_counts(b'[["0", "\\udc80\\n", [], 1]]')
    assert last.operation.startswith("\\x1b[2J")
    assert len(last.operation) <= 200
    assert group.description == "\\udc80"


def test_the_active_call_of_a_rank():
    assert parse_active_call(b"") is None
    assert parse_active_call(b"recv_object_list recv 2") == ActiveCall("recv_object_list", "recv", 2)
    barrier = ActiveCall("monitored_barrier", "monitored_barrier", None)
    assert parse_active_call(b"monitored_barrier monitored_barrier -1") == barrier
    in_store = ActiveCall("wait", "store.wait", None, key="epoch 1|é")
    assert parse_active_call(b"wait store.wait -1 - epoch\\x201\\x7c\\xe9") == in_store
    begins = ActiveCall("init_process_group", "init_process_group", 1, world_size=3)
    assert parse_active_call(b"init_process_group init_process_group 1 - - 3") == begins
    for number in (b"9999999999", b"-3"):
        assert parse_active_call(b"a b %b - - %b" % (number, number)) == ActiveCall("a", "b", None), (
            "nodes would refuse these"
        )
    for reply in (
        b"recv",
        b"recv recv two",
        b"a b c d",
        b"a b 1 - \\x",
        b"a b 1 - c d",
        b"a b 1 - c 2 3",
        b"\xff \xff 1",
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_active_call(reply)
