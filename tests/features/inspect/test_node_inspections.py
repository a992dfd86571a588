"""Tests of inspections on one node: their queue, with a simulated inspector; one, with a simulated rank."""

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.node.node_ranks import RankProcess
from ddplaunch.core.node.rank_channel import RankChannel
from ddplaunch.core.output.isolation import IsolatedLoop
from ddplaunch.features.inspect.diagnosis.inspection import Detail, GroupState, Inspection
from ddplaunch.features.inspect.node import node_inspections, rank_inspector
from ddplaunch.features.inspect.node.node_inspections import NodeInspections
from ddplaunch.features.inspect.node.rank_inspector import RankInspector
from ddplaunch.features.inspect.node.rank_stack_dump import NO_SIGNAL_ERROR


def test_each_request_gets_a_reply_in_time_also_after_a_bug_of_the_inspector(monkeypatch):
    loop, replies, notes, begun, is_broken = EventLoop(), list[Any](), list[str](), list[Any](), []

    class Inspector:
        def __init__(self, loop, ranks, detail, on_done, timeout_s):
            begun.append((detail, timeout_s))
            self.begin = lambda: on_done(Inspection(1.0, (), 7)) if not is_broken else {}["a bug"]

    monkeypatch.setattr(node_inspections, "RankInspector", Inspector)
    cleared: list[int] = []
    channel = SimpleNamespace(clear_reply_handler=lambda: cleared.append(0))
    ranks = cast("Any", SimpleNamespace(channels={0: channel}, plan=SimpleNamespace(world_size=3)))
    inspections = NodeInspections(
        loop, lambda found, ranks: Inspection(9.0, (), found.world_size), notes.append, node_only=True
    )

    def ask(*details: Detail) -> list[Any]:
        replies.clear()
        for detail in details:
            request = RpcRequest(1, "inspect", 5.0, detail)
            inspections.answer(loop, ranks, request, lambda found, is_last: replies.append((found, is_last)))
        over = loop.call_later(20, lambda: replies.append("too late"))
        while len(replies) < len(details):
            loop.run_once()
        over.cancel()
        assert all(is_last and found.node_only for found, is_last in replies)
        return [(found.moment == 9.0, found.world_size) for found, _ in replies]

    assert ask(Detail.WAITS, Detail.STACKS) == [(True, 7), (False, 7)], "one after the other"
    assert [each[0] for each in begun] == [Detail.WAITS, Detail.STACKS]
    assert all(0 < timeout_s < 5.0 for _, timeout_s in begun), "the reply takes time too"
    is_broken.append(True)
    for _ in range(2):
        assert ask(Detail.STACKS) == [(False, 3)], "empty"
    assert (len(begun), cleared, len(notes)) == (3, [0], 1)


def reply(count: int = 5, completed: int = 4, *, initialised: bool = True, entries: str = "[]") -> bytes:
    """A rank's reply: ``count`` operations in its group, the first ``completed`` of them are over."""
    groups = f'[["0", "default_pg", [0, 1], {count}]]'
    status = f'{{"last_enqueued_collective": {count}, "last_completed_collective": {completed}}}'
    trace = f'{{"pg_status": {{"0": {status}}}, "entries": {entries}}}'
    return "\t".join(["01"[initialised], groups, "all_reduce all_reduce -1", trace]).encode()


ENTRIES = (
    '[{"process_group": ["0", "default_pg"], "collective_seq_id": 5, "time_created_ns": 7000000000, "op_id": 5,'
    ' "profiling_name": "gloo:all_reduce", "state": "scheduled"}]'
)
UNCHANGED = reply().replace(b"all_reduce -1", b"all_reduce 1").replace(b", 5]]", b", 6]]")


@pytest.mark.parametrize(
    ("replies", "answers", "moved"),
    [
        ({b"s1": reply(), b"s2": reply(), b"e3": reply(entries=ENTRIES)}, True, False),
        ({b"s1": reply(), b"s2": reply(completed=5)}, True, True),
        ({b"s1": reply(), b"s2": UNCHANGED}, True, True),
        ({b"s1": b"1\tmalformed\t\t"}, None, False),
        ({b"s1": reply(initialised=False), b"s2": reply()}, None, False),
    ],
    ids=["waits", "completes", "sends", "malformed", "no group"],
)
def test_the_collectives_of_a_rank_are_read_twice(monkeypatch, replies, answers, moved):
    """A rank that moves is not waiting; only of one that waits are the last collectives read."""
    for name in ("READ_TIMEOUT_S", "DETAILS_TIMEOUT_S"):
        monkeypatch.setattr(rank_inspector, name, 60.0)
    loop, found, asked = EventLoop(), list[Inspection](), list[bytes]()
    channel = RankChannel(loop, lambda what: None)
    rank = SimpleNamespace(rank=0, host="n0")
    plan = SimpleNamespace(local_ranks=[rank], rank_of=lambda number: rank, world_size=2, master_port=0)
    ranks = SimpleNamespace(
        plan=plan,
        processes={0: RankProcess(cast("Any", rank), os.getpid(), None)},
        channels={0: channel},
        attempt=SimpleNamespace(not_spawned=0),
    )
    with socket.socket(fileno=channel.rank_fd) as rank_end:
        rank_end.sendall(b"h 0 0 9\nt\n")

        def on_request() -> None:
            for line in rank_end.recv(1 << 16).splitlines():
                asked.append(line)
                rank_end.sendall(line + b" " + replies.get(line, reply()) + b"\n")

        loop.watch_fd(rank_end.fileno(), on_request)
        isolated = IsolatedLoop(loop, "an inspection", lambda note: None)
        RankInspector(isolated, cast("Any", ranks), Detail.WAITS, found.append, timeout_s=60).begin()
        while not found:
            loop.run_once()
        loop.unwatch_fd(rank_end.fileno())
    channel.close()
    (seen,) = found[0].ranks
    assert (found[0].world_size, seen.host, seen.no_stack) == (2, "n0", NO_SIGNAL_ERROR)
    assert (seen.answers, seen.moved) == (answers, moved)
    completed = 5 if b"5}}" in replies.get(b"s2", b"") else 4
    assert seen.groups == (() if answers is None and not asked[1:] else (GroupState("0", 5, completed),))
    assert [each.entered for each in seen.last] == [7.0] * (b"e3" in replies)
    assert [each for each in asked if each in replies or moved] == [*replies]
