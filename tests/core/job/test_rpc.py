"""Replays of requests to all nodes, with kinds of their own: no processes, sockets or real clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.base.event_loop import Timer
from ddplaunch.base.frames import LENGTH, ProtocolError
from ddplaunch.base.types import decode, encode
from ddplaunch.core.agent.node_rpc import NODE_ZERO_MARGIN_S, NodeRpc
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.job.job_deadlines import RequestLate
from ddplaunch.core.job.node_table import JoinedNode, NodePhase, NodeTable
from ddplaunch.core.job.rpc import BUG_ERROR, MAX_OPEN_REQUESTS, TOO_MANY_ERROR, Rpc, convert_payload
from ddplaunch.core.machine import Command, Send
from ddplaunch.core.messages import NoteMessage, RpcReply, RpcRequest
from ddplaunch.core.rpc_kind import Kind
from ddplaunch.observe.diagnosis.inspection import Detail
from tests.core.job.job_steps import Job
from tests.core.job_configs import make_job_config


class Merged(Kind):
    """A reply is a tuple of ranks; the merged one has them all, and the nodes without a reply."""

    name, timeout_s = "merged", 3.0

    def claimed_ranks(self, reply):
        return reply

    def merge(self, replies, silent_nodes, world_size, now):
        return sorted(rank for each in replies.values() for rank in each), silent_nodes

    def convert_for_requester(self, reply, replies, clock_of, node):
        return *reply, node


class InParts(Kind):
    """A reply is a rank and a time of the node's clock."""

    name, timeout_s, in_parts, busy_error = "parts", 60.0, True, "busy"

    def claimed_ranks(self, reply):
        return [reply[0]]

    def to_local_clock(self, reply, offset, now):
        return reply[0], reply[1] - offset.offset_s


class Nodes:
    """Three nodes with two ranks each; node N's clock is N hours ahead. ``done`` has what node 0 gathered."""

    def __init__(self) -> None:
        self.table = NodeTable(make_job_config(min_nodes=3, max_nodes=3))
        self.now, self.deadlines, self.commands = Now(0.0, 0.0), Deadlines[Deadline](), list[Command]()
        for number in range(3):
            hello = Job().hello(number)
            ranks, offset = range(2 * number, 2 * number + 2), ClockOffset(3600.0 * number, 0.0)
            self.table[number] = JoinedNode(number, hello, NodePhase.RUNNING, ranks, clock_offset=offset)
        self.rpc = Rpc(self.table, self.deadlines, {each.name: each for each in (Merged(), InParts())})
        self.done: list[Any] = []

    def deliver(self) -> None:
        while self.rpc.deliver_next_reply():
            pass

    def gather(self, timeout_s: float | None = None) -> None:
        self.commands += self.rpc.gather("merged", "what", self.done.append, self.now, timeout_s)

    def request(self, node: int, kind: str, timeout_s: float = 60.0, serial: int = 7) -> None:
        self.commands += self.rpc.on_message(node, RpcRequest(serial, kind, timeout_s, "what"), self.now)

    def reply(self, node: int, payload: Any, *, serial: int = 1, kind: str = "merged", is_last: bool = True) -> None:
        self.commands += self.rpc.on_message(node, RpcReply(serial, kind, payload, is_last), self.now)
        self.deliver()

    def lose(self, node: int) -> None:
        del self.table[node]
        self.commands += self.rpc.on_node_lost(node, self.now)

    def wait(self, seconds: float) -> None:
        self.now = Now(self.now.mono + seconds, 0.0)
        while isinstance(late := self.deadlines.pop_due(self.now.mono), RequestLate):
            self.commands += self.rpc.on_deadline(late, self.now)
        self.deliver()

    def take(self) -> list[tuple[int, Any]]:
        commands, self.commands = self.commands, []
        return [(each.node_rank, each.message) for each in commands if isinstance(each, Send)]


@pytest.fixture
def nodes():
    return Nodes()


def test_all_nodes_get_one_request_with_its_deadline(nodes):
    nodes.gather(1.0)
    assert nodes.take() == [(node, RpcRequest(1, "merged", 1.0, "what")) for node in range(3)]
    for node in (2, 0, 1):
        assert not nodes.done
        nodes.reply(node, (2 * node, 2 * node + 1))
    assert nodes.done == [([0, 1, 2, 3, 4, 5], ())]
    nodes.wait(10)
    assert len(nodes.done) == 1


def test_at_the_deadline_the_others_replies_are_used(nodes):
    nodes.gather(1.0)
    nodes.reply(1, (2, 3))
    nodes.wait(0.99)
    assert not nodes.done
    nodes.wait(0.01)
    assert nodes.done == [([2, 3], ("node 0 (n0)", "node 2 (n2)"))]


def test_a_late_reply_is_ignored(nodes):
    nodes.gather(1.0)
    nodes.wait(1)
    nodes.reply(1, (2, 3))
    nodes.gather()
    nodes.reply(1, (2,), serial=1)
    nodes.reply(1, (3,), serial=2)
    nodes.reply(1, (2,), serial=2)  # it has replied
    nodes.wait(3)
    assert nodes.done[1:] == [([3], ("node 0 (n0)", "node 2 (n2)"))]


def test_a_node_lost_meanwhile_is_not_waited_for(nodes):
    nodes.gather()
    nodes.reply(0, (0, 1))
    nodes.reply(1, (2, 3))
    nodes.lose(2)
    assert not nodes.done, "not while the loss is being handled"
    nodes.wait(0)
    assert nodes.done == [([0, 1, 2, 3], ())]


def test_the_loss_of_all_that_are_waited_for(nodes):
    nodes.gather()
    nodes.reply(0, ())
    nodes.lose(1)
    nodes.lose(2)
    nodes.wait(3)
    assert nodes.done == [([], ())]


@pytest.mark.parametrize("claimed", [(0,), (2, 4), (2, 2), (-1,)])
def test_a_node_reports_its_own_ranks_once_each(nodes, claimed):
    nodes.gather()
    with pytest.raises(ProtocolError):
        nodes.reply(1, claimed)
    nodes.lose(1)
    nodes.reply(0, (0, 1))
    nodes.reply(2, (4, 5))
    nodes.wait(0)
    assert nodes.done == [([0, 1, 4, 5], ())]


def test_ranks_are_those_of_the_moment_of_the_request(nodes):
    """The ranks of an elastic job may change before the reply arrives."""
    nodes.gather()
    nodes.table[1].ranks = range(6)
    nodes.reply(1, (2, 3))
    with pytest.raises(ProtocolError):
        nodes.reply(2, (0,))


@pytest.mark.parametrize(
    "reply", [{"kind": "parts"}, {"is_last": False}, {"payload": None}], ids=["another kind", "a part", "nothing"]
)
def test_a_reply_of_another_form_is_a_protocol_error(nodes, reply):
    nodes.gather()
    with pytest.raises(ProtocolError):
        nodes.reply(1, **{"payload": (2, 3), **reply})


def test_a_request_of_a_node_gets_the_merged_reply(nodes):
    nodes.request(2, "merged", 2.0)
    assert [node for node, _ in nodes.take()] == [0, 1, 2]
    for node in (0, 1):
        nodes.reply(node, (2 * node,))
    nodes.wait(2)
    assert nodes.take() == [(2, RpcReply(7, "merged", ([0, 2], ("node 2 (n2)",), 2), silent_nodes=("node 2 (n2)",)))]


def test_a_node_that_is_lost_gets_no_reply_nor_does_one_that_joins_in_its_place(nodes):
    nodes.request(2, "merged")
    lost = nodes.table[2]
    nodes.lose(2)
    nodes.take()
    nodes.table[2] = lost
    for node in (0, 1):
        nodes.reply(node, (2 * node,))
    assert nodes.take() == []


def test_a_node_cannot_extend_the_timeout_of_a_kind(nodes):
    nodes.request(1, "merged", 1e6)
    assert {message.timeout_s for _, message in nodes.take()} == {3.0}
    nodes.wait(3)
    assert [node for node, _ in nodes.take()] == [1]


def test_parts_are_forwarded_as_they_come_on_the_clock_of_node_0(nodes):
    nodes.request(2, "parts")
    nodes.take()
    nodes.reply(1, (2, 3700.0), kind="parts", is_last=False)
    nodes.reply(0, (1, 100.0), kind="parts", is_last=False)
    assert nodes.take() == [(2, RpcReply(7, "parts", (rank, 100.0), is_last=False)) for rank in (2, 1)]
    for node in range(3):
        assert not nodes.take()
        nodes.reply(node, None, kind="parts")
    assert nodes.take() == [(2, RpcReply(7, "parts"))]


def test_a_part_about_the_same_rank_again_is_a_protocol_error(nodes):
    nodes.request(2, "parts")
    nodes.reply(1, (2, 0.0), kind="parts", is_last=False)
    for rank in (2, 0):
        with pytest.raises(ProtocolError):
            nodes.reply(1, (rank, 0.0), kind="parts", is_last=False)


def test_parts_after_which_a_node_is_lost(nodes):
    nodes.request(0, "parts")
    nodes.reply(1, (2, 0.0), kind="parts", is_last=False)
    nodes.reply(0, None, kind="parts")
    nodes.reply(2, None, kind="parts")
    nodes.take()
    nodes.lose(1)
    nodes.wait(0)
    assert nodes.take() == [(0, RpcReply(7, "parts"))]


def test_one_exclusive_request_at_a_time(nodes):
    nodes.request(1, "parts")
    nodes.take()
    nodes.request(2, "parts", serial=8)
    assert nodes.take() == [(2, RpcReply(8, "parts", refusal="busy"))]
    nodes.gather()
    assert len(nodes.take()) == 3, "another kind"
    for node in range(3):
        nodes.reply(node, None, kind="parts")
    nodes.take()
    nodes.request(2, "parts", serial=9)
    assert len(nodes.take()) == 3


def test_the_number_of_open_requests_is_limited(nodes):
    for serial in range(MAX_OPEN_REQUESTS):
        nodes.request(1, "merged", serial=serial)
    nodes.take()
    nodes.request(1, "merged", serial=100)
    assert nodes.take() == [(1, RpcReply(100, "merged", refusal=TOO_MANY_ERROR))]
    nodes.wait(3)
    assert len(nodes.take()) == MAX_OPEN_REQUESTS


def test_a_job_without_ranks_replies_at_once(nodes):
    nodes.table.clear()
    nodes.gather()
    nodes.deliver()
    assert nodes.done == [([], ())]


@pytest.mark.parametrize("hook", ["claimed_ranks", "to_local_clock", "merge", "convert_for_requester"])
def test_a_kind_that_raises_is_reported_once_and_refused_from_then_on(nodes, hook, monkeypatch):
    def fail(*arguments):
        raise ValueError(hook)

    monkeypatch.setattr(Merged, hook, fail)
    for serial in (1, 2):
        nodes.request(2, "merged", serial=serial)
        if serial == 1:
            for node in range(3):
                nodes.reply(node, (2 * node,))
    sent = [message for _, message in nodes.take() if not isinstance(message, RpcRequest)]
    (note,) = [message.text for message in sent if isinstance(message, NoteMessage)]
    assert note.startswith("bug in ddplaunch: the request merged failed and is left out, the job continues")
    assert sent[1:] == [RpcReply(serial, "merged", refusal=BUG_ERROR) for serial in (1, 2)]


def test_a_payload_is_checked_on_arrival():
    arrived = decode(encode(RpcRequest(1, "inspect", 1.0, Detail.WAITS))[LENGTH.size :], [RpcRequest])
    assert convert_payload(arrived) == RpcRequest(1, "inspect", 1.0, Detail.WAITS)
    assert convert_payload(RpcReply(1, "inspect")) == RpcReply(1, "inspect"), "the end of a reply in parts"
    for wrong in (
        RpcRequest(1, "inspect", 1.0, "all"),
        RpcRequest(1, "inspect", 1.0, None),
        RpcReply(1, "inspect", {"moment": 0.0, "ranks": [{"rank": -1}], "world_size": 1}),
        RpcReply(1, "inspect", []),
        RpcRequest(1, "os", 1.0, None),
        RpcReply(1, "inspect.rpc", {}),
    ):
        with pytest.raises(ProtocolError):
            convert_payload(wrong)


class Client:
    """A node's requests: ``sent`` has its messages, ``replies`` what its clients got."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[Timer]()
        self.sent: list[Any] = []
        self.replies: list[RpcReply] = []
        self.reports: list[str] = []
        loop = SimpleNamespace(call_later=self.call_later)
        self.rpc = NodeRpc(loop, self.sent.append, self.reports.append)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        self.timers.append(Timer(callback, self.now + seconds))
        return self.timers[-1]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for timer in self.timers:
            if timer.when <= self.now and timer.callback is not None:
                timer.callback()
                timer.cancel()

    def request(self, kind: str, timeout_s: float) -> None:
        self.rpc.request(kind, "what", timeout_s, self.replies.append)


def test_a_client_gets_all_parts_and_nothing_after_the_last():
    client = Client()
    client.request("parts", 60.0)
    assert client.sent == [RpcRequest(1, "parts", 60.0, "what")]
    replies = [RpcReply(1, "parts", 5, is_last=False), RpcReply(1, "parts", 6, is_last=False), RpcReply(1, "parts")]
    for reply in (*replies, RpcReply(1, "parts", 7)):
        client.rpc.on_reply(reply)
    client.wait(100)
    assert client.replies == replies


def test_a_client_does_not_wait_longer_than_the_deadline_for_node_0():
    client = Client()
    client.request("merged", 3.0)
    client.wait(3)
    assert not client.replies
    client.wait(NODE_ZERO_MARGIN_S)
    client.rpc.on_reply(RpcReply(1, "merged", "late"))
    assert client.replies == [RpcReply(1, "merged", silent_nodes=("node 0",))]


def test_a_client_gets_no_reply_of_another_kind():
    client = Client()
    client.request("merged", 3.0)
    for reply in (RpcReply(1, "parts", 5), RpcReply(2, "merged", 5)):
        client.rpc.on_reply(reply)
    assert not client.replies


def test_a_client_that_raises_is_reported_and_the_job_goes_on():
    client = Client()
    client.rpc.request("parts", "what", 60.0, lambda reply: 1 / reply.payload)
    for reply in (RpcReply(1, "parts", 0, is_last=False), RpcReply(1, "parts", 0)):
        client.rpc.on_reply(reply)
    (report,) = client.reports
    assert report.startswith("bug in ddplaunch: what gets the replies to the request parts failed and is left out")


def test_a_request_of_node_0_goes_to_the_handler_of_its_kind():
    client, ranks = Client(), object()
    client.rpc.handlers["merged"] = lambda loop, ranks, request, reply: reply((ranks, request.payload), True)
    client.rpc.on_request(ranks, RpcRequest(9, "merged", 1.0, "what"), Merged())
    assert client.sent == [RpcReply(9, "merged", (ranks, "what"))]


def test_a_handler_that_raises_is_reported_and_the_job_goes_on():
    client = Client()
    client.rpc.handlers["merged"] = lambda loop, *request: loop.call_later(1.0, lambda: 1 / 0)
    client.rpc.on_request(object(), RpcRequest(9, "merged", 3.0, "what"), Merged())
    client.wait(1)
    (report,) = client.reports
    assert report.startswith(
        "bug in ddplaunch: the answer to the request merged failed and is left out, the job continues"
    )
    assert "ZeroDivisionError" in report
