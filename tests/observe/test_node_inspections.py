"""Tests of inspections on one node: their queue, with a simulated inspector; one, with a simulated rank."""

import os
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent.node_ranks import RankProcess
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import RpcRequest
from ddplaunch.observe.diagnosis.inspection import Detail, GroupState, Inspection
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits
from ddplaunch.observe.node import inspection_machine, node_inspections
from ddplaunch.observe.node.node_inspections import NodeInspections
from ddplaunch.observe.node.rank_inspector import RankInspector
from ddplaunch.observe.node.rank_stack_dump import NO_SIGNAL_ERROR


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
        loop, lambda found, ranks: Inspection(9.0, (), found.world_size), lambda: (), notes.append, node_only=True
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
    assert all(0 < timeout_s <= 4.9 for _, timeout_s in begun), "the reply takes time too"
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


LATE = b""


def inspect(monkeypatch: pytest.MonkeyPatch, replies: list[dict[bytes, bytes]], asked: list[bytes]) -> Inspection:
    """Inspect ranks that give these replies to these requests, which are added to ``asked``."""
    monkeypatch.setattr(inspection_machine, "DETAILS_TIMEOUT_S", 60.0)
    is_late = any(LATE in each.values() for each in replies)
    monkeypatch.setattr(inspection_machine, "READ_TIMEOUT_S", 0.5 if is_late else 60.0)
    loop, found = EventLoop(), list[Inspection]()
    channels = [RankChannel(loop, lambda what: None) for _ in replies]
    ranks = [SimpleNamespace(rank=rank, host="n0") for rank in range(len(replies))]
    plan = SimpleNamespace(local_ranks=ranks, rank_of=lambda number: ranks[number], world_size=2, master_port=0)
    on_node = SimpleNamespace(
        plan=plan,
        processes={each.rank: RankProcess(cast("Any", each), os.getpid(), None) for each in ranks},
        channels=dict(enumerate(channels)),
        attempt=SimpleNamespace(not_spawned=0),
    )

    def on_request(end: socket.socket, known: dict[bytes, bytes]) -> None:
        for line in end.recv(1 << 16).splitlines():
            asked.append(line)
            if (given := known.get(line, reply())) != LATE:
                end.sendall(line + b" " + given + b"\n")
            else:
                monkeypatch.setattr(inspection_machine, "READ_TIMEOUT_S", 60.0)  # the next request has a reply

    ends = [socket.socket(fileno=channel.rank_fd) for channel in channels]
    for end, known in zip(ends, replies, strict=True):
        end.sendall(b"h 0 0 9\nt\n")
        loop.watch_fd(end.fileno(), partial(on_request, end, known))
    isolated = IsolatedLoop(loop, "an inspection", lambda note: None)
    RankInspector(isolated, cast("Any", on_node), Detail.WAITS, found.append, timeout_s=60).begin()
    while not found:
        loop.run_once()
    for end, channel in zip(ends, channels, strict=True):
        loop.unwatch_fd(end.fileno())
        end.close()
        channel.close()
    return found[0]


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
    asked = list[bytes]()
    found = inspect(monkeypatch, [replies], asked)
    (seen,) = found.ranks
    assert (found.world_size, seen.host, seen.no_stack) == (2, "n0", NO_SIGNAL_ERROR)
    assert (seen.answers, seen.moved) == (answers, moved)
    completed = 5 if b"5}}" in replies.get(b"s2", b"") else 4
    assert seen.groups == (() if answers is None and not asked[1:] else (GroupState("0", 5, completed),))
    assert [each.entered for each in seen.last] == [7.0] * (b"e3" in replies)
    assert [each for each in asked if each in replies or moved] == [*replies]


def test_a_rank_whose_first_reply_is_late_has_not_moved(monkeypatch):
    """It was in the garbage collector: there is no earlier count to compare with, and others still wait for it."""
    late = {b"s1": LATE, b"s2": reply(4, 4), b"e3": reply(4, 4)}
    found = inspect(monkeypatch, [{b"e3": reply(entries=ENTRIES)}, late], [])
    assert [(each.answers, each.moved, each.groups) for each in found.ranks] == [
        (True, False, (GroupState("0", 5, 4),)),
        (True, False, (GroupState("0", 4, 4),)),
    ]
    assert "rank 1 has not entered it" in describe_waits(found)[0]
