"""Tests of the queue of inspections on one node, with an inspector that is simulated."""

from types import SimpleNamespace
from typing import Any, cast

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.messages import RpcRequest
from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection
from ddplaunch.features.inspect.node import node_inspections
from ddplaunch.features.inspect.node.node_inspections import NodeInspections


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
