"""Tests of the page that ``ddplaunch stacks`` prints, and its JSON."""

import json

import click
import pytest
from msgspec.structs import replace

from ddplaunch.observe.diagnosis.inspection import (
    Frame,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
    Worker,
)
from ddplaunch.observe.stacks_text import render_stacks, stacks_to_json
from tests.observe.diagnosis.clauses import NOT_PYTHON, ONLY_STACKS
from tests.observe.diagnosis.recorded_hangs import full_inspection, stack, with_rank_changed
from tests.observe.diagnosis.test_waits import WAITING, in_library, rank, together


def page(inspection):
    return click.unstyle(render_stacks(inspection))


def test_the_page_of_a_hang():
    hang = full_inspection("absent")
    entered = hang.ranks[0].last[0].entered
    assert page(replace(hang, moment=entered + 75)) == (
        "ranks 0, 1 wait in all_reduce #5 of default_pg (float32[6]), entered at train.py:16; "
        "rank 2 has not entered it: load_batch at data.py:9\n"
        "\n"
        "rank 2: load_batch at data.py:9 (running)\n"
        "  load_batch at data.py:9\n"
        "  absent at train.py:21\n"
        "  train.py:158\n"
        "\n"
        "ranks 0, 1: step at train.py:16 (wait in all_reduce #5 for 75 s)\n"
        "  all_reduce at torch/distributed/distributed_c10d.py:4181\n"
        "  … 1 call in torch\n"
        "  step at train.py:16\n"
        "  absent at train.py:22\n"
        "  train.py:158\n"
    )


def test_ranks_at_one_user_line_are_distinguished_by_library_calls():
    lines = page(together(in_library(0, "read", "download", "train"), in_library(1, "tokenise", "train"))).splitlines()
    assert "rank 0: train.py:3, in download at lab/download.py:7 (running)" in lines
    assert "rank 1: train.py:3, in tokenise at lab/tokenise.py:7 (running)" in lines


def test_busy_and_ended_workers_of_a_dataloader_are_described():
    fetch = Frame("fetch", "/lib/python3/site-packages/torch/utils/data/_utils/fetch.py", 1, False)
    idle = Worker(5, (Frame("get", "/lib/python3.11/queue.py", 2, False),))
    busy = [Worker(6 + n, (Frame("read", "data.py", n, True), fetch)) for n in (1, 1, 2)]
    inside = Worker(9, (Frame("load", "/lib/python3/site-packages/lab/io.py", 3, False), fetch))

    def state(*workers):
        return page(with_rank_changed(full_inspection("loader"), 2, workers=workers)).splitlines()

    assert state(idle)[0].endswith("it waits for its DataLoader, loader at data.py:37")
    assert state(idle, *busy)[0].endswith(
        "loader at data.py:37 (a worker: read at data.py:1; a worker: read at data.py:2)"
    )
    assert state(inside)[0].endswith("loader at data.py:37 (a worker: load at lab/io.py:3)")
    assert state(Worker(4711, code=-9), *busy)[0].endswith(
        "(worker pid 4711 has ended: SIGKILL; a worker: read at data.py:1; a worker: read at data.py:2)"
    )
    lines = state(idle, busy[0])
    assert lines[lines.index("  its worker (pid 7):") :][:3] == [
        "  its worker (pid 7):",
        "  read at data.py:1",
        "  … 1 call in torch",
    ]
    assert not any("pid 5" in line for line in lines)


def test_calls_in_libraries_are_counted():
    lines = page(full_inspection("loader")).splitlines()
    assert "  select at selectors.py:415" in lines
    assert "  … 8 calls in multiprocessing, torch" in lines
    library = Frame("f", "/usr/lib/python3.11/site-packages/numpy/core.py", 2, False)
    imports = (Frame("exec", f"<frozen {name}>", 1, False) for name in ("importlib._bootstrap_external", "runpy"))
    frames = (library, *imports, library, *stack("f at train.py:1")[0].frames)
    lines = page(together(replace(rank(0, 1, 1), threads=(Thread(frames),)))).splitlines()
    assert lines[3:5] == ["  f at numpy/core.py:2", "  … 3 calls in importlib, runpy, numpy"]


def test_a_page_holds_64_ranks_in_80_columns():
    ranks = [rank(n, 8, 7, *WAITING) if n != 7 else rank(n, 7, 7, "load at data.py:2") for n in range(64)]
    lines = page(together(*ranks)).splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines[1:])


def test_other_threads_in_user_code_are_shown():
    own, other = Frame("fetch", "data.py", 7, True), Frame("wait", "/usr/lib/python3.11/threading.py", 327, False)
    threads = (*stack("main at train.py:3"), Thread((other,)), Thread((other, own), "feeder"))
    lines = page(together(replace(rank(0, 1, 1), threads=threads))).splitlines()
    assert lines[2:] == [
        "rank 0: main at train.py:3 (running)",
        "  main at train.py:3",
        "  another thread feeder:",
        "  wait at threading.py:327",
        "  fetch at data.py:7",
    ]


def test_deep_recursion_is_cut():
    lines = page(together(rank(0, 1, 1, *[f"walk at tree.py:{n}" for n in range(100)]))).splitlines()
    assert len(lines) == 34
    assert lines[-1] == "  … 70 calls more"


def test_deep_recursion_through_a_library_is_cut():
    own, library = Frame("forward", "model.py", 7, True), Frame("_call_impl", "/lib/python3/torch/module.py", 1, False)
    lines = page(together(replace(rank(0, 1, 1), threads=(Thread((own, library) * 40),)))).splitlines()
    assert lines.count("  forward at model.py:7") == 30
    assert len(lines) == 64
    assert lines[-1] == "  … 10 calls more"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"no_stack": NOT_PYTHON}, f"  no stack: {NOT_PYTHON}"),
        ({"condition": ProcessCondition.STOPPED}, "rank 2: stopped (SIGSTOP)"),
        ({"condition": ProcessCondition.EXITED, "code": 0}, "rank 2: ended (exit code 0)"),
        ({"condition": ProcessCondition.PENDING}, "rank 2: not started"),
        ({"host": "n2"}, "rank 2 (on n2): running"),
    ],
)
def test_ranks_without_a_stack(fields, line):
    changed_one = with_rank_changed(full_inspection("absent"), 2, threads=(), **fields)
    assert line in page(changed_one).splitlines()


def test_hosts_are_named_if_a_group_is_on_two_at_most():
    ranks = [rank(n, 1, 1, "f at a.py:1", host=f"n{n}") for n in range(3)]
    for found, where in ((ranks[:2], "ranks 0, 1 (on n0, n1)"), (ranks, "ranks 0 to 2")):
        assert page(together(*found)).splitlines()[2] == f"{where}: f at a.py:1 (running)"


def test_notes_on_what_is_not_shown():
    hang = full_inspection("absent")
    old = [replace(each, answers=None, groups=(), last=()) for each in hang.ranks]
    for inspection, note in (
        (replace(hang, silent=("node 2 (n2)",)), "node 2 (n2) did not answer"),
        (replace(hang, node_only=True), "only the ranks of this node are shown (--control none)"),
        (together(*old), ONLY_STACKS),
    ):
        assert f"note: {note}" in page(inspection).splitlines()
    assert "note:" not in page(full_inspection("no_init"))


def test_control_characters_in_names_are_escaped():
    evil = RankInspection(
        0, "\x1b[2J", 1, ProcessCondition.ALIVE, threads=(Thread((Frame("f\x1b]0;x\x07", "a\n.py", 1, True),)),)
    )
    text = page(Inspection(0.0, (evil, replace(evil, rank=1, host="b")), 2, silent=("node\x1b[2J 1",)))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_json_has_the_sentences_and_all_that_was_found():
    found = json.loads(json.dumps(stacks_to_json(full_inspection("subgroup"))))
    assert found["world_size"] == 3
    assert len(found["sentences"]) == 2
    first = found["waits"][0]
    assert first["text"] == found["sentences"][0]
    assert (first["operation"], first["group"], first["number"]) == ("all_reduce", "pair", 1)
    assert (first["waiting"], first["missing"]) == ([0], [{"rank": 1, "waits": False, "calls": ""}])
    assert (first["partners"], first["cycle"]) == ([], [])
    assert [each["cycle"] for each in json.loads(json.dumps(stacks_to_json(full_inspection("circle"))))["waits"]] == [
        [0, 1],
        [],
    ]
    assert found["groups"][0] == {
        "ranks": [0],
        "state": "waits in all_reduce #1 of pair",
        "waited": pytest.approx(found["groups"][0]["waited"]),
    }
    assert [each["condition"] for each in found["ranks"]] == ["alive"] * 3
    assert found["ranks"][1]["threads"][0]["frames"][0]["function"] == "load_batch"
