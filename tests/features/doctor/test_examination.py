"""Tests of the examination of several nodes, whose replies are simulated."""

from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.features.doctor import messages
from ddplaunch.features.doctor.benchmark import (
    COLLECTIVES,
    SIZES,
    CollectiveTimes,
    DeviceThroughput,
    MeasureCollective,
    PrepareDevices,
)
from ddplaunch.features.doctor.connectivity import ConnectResult, ListenReply, PingResult, StreamResult
from ddplaunch.features.doctor.examination import Examiner
from ddplaunch.features.doctor.node_facts import NetworkAddress, RouteToNodeZero
from ddplaunch.features.doctor.thorough_examiner import ThoroughExaminer
from tests.features.doctor.facts import FACTS, GIB

RAIL, DOCKER = "192.168.0.0/24", "172.17.0.0/16"


class Node:
    """A node that replies at once, in the place of a ``DoctorPeer``.

    ``replies`` are those that differ, by the type of the request: a reply, or None for a lost connection.
    """

    is_waiting, check_command, took = False, "", 0.001

    def __init__(self, number: int, gpus: int = 0, skew_s: float = 0.0, has_route: bool = True, **replies: Any):
        self.number, self.name, self.error, self.answer = number, f"n{number}", None, None
        self.sent, self.requests = 1000.0 + number, []
        networks = (
            NetworkAddress("eth0", f"10.0.0.{number}", "10.0.0.0/24"),
            NetworkAddress("eth1", f"192.168.0.{number}", RAIL),
            NetworkAddress("docker0", "172.17.0.1", DOCKER),
        )
        link = RouteToNodeZero(f"10.0.0.{number}", "eth0", 1500, (number + 1) * 1000, "10.0.0.0") if has_route else None
        torch = replace(FACTS.torch, devices=gpus)
        self._replies = {
            "DescribeNode": replace(FACTS, host=self.name, link=link, networks=networks, torch=torch),
            "GetTime": messages.TimeReply(self.sent + self.took / 2 + skew_s),
            "ListenOnPorts": ListenReply(40000 + number, ()),
            "PingNode": PingResult(1e-4, 300, 0),
            "SendStream": messages.StreamReply(StreamResult(True, 8e8)),
            "PrepareDevices": messages.PrepareReply((DeviceThroughput("cpu", 1e9),)),
            "MeasureCollective": CollectiveTimes((1e-4, 1e-3, 1e-2)),
            **replies,
        }

    def send_request(self, question: Any, kind: type[object]) -> None:
        self.requests.append(question)
        self.answer = self._replies.get(type(question).__name__, ())
        if callable(self.answer):
            self.answer = self.answer(question)
        if isinstance(question, messages.ConnectTo):
            unreachable: Any = self.answer
            outcomes = ("silent" if each in unreachable else "ok" for each, _ in question.addresses)
            self.answer = messages.ConnectReply(tuple(ConnectResult(outcome, 1e-4) for outcome in outcomes))
        if self.answer is None:
            self.error = "its connection closed"

    def sent_of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.requests if isinstance(each, kind)]


class AnsweredLoop(EventLoop):
    """All replies have arrived when the examination begins to wait for them."""

    def run_once(self) -> None:
        pass


def examine(*nodes: Node, kind: type[Examiner] = Examiner):
    progress: list[str] = []
    address = "10.0.0.0" if len(nodes) > 1 else ""
    results = kind(AnsweredLoop(), cast("Any", nodes), address, (29500, 29501), {"A": "b"}, progress.append).examine()
    return results, progress


def measured(speeds) -> set[tuple[Any, ...]]:
    return {(*each.nodes, each.name) for each in speeds if not each.error}


ALONE, PAIRS = [(0,), (1,), (2,)], [(0, 1), (0, 2), (1, 2)]


def all_measured(*groups: tuple[int, ...], names=("all_reduce",)) -> set[tuple[Any, ...]]:
    return {(*group, name) for group in groups for name in names}


def test_two_nodes_without_faults():
    nodes = Node(0), Node(1, skew_s=2.5)
    found, progress = examine(*nodes)
    assert [(each.trouble, each.clock) for each in found.nodes] == [(None, 0.0), (None, pytest.approx(2.5))]
    ways = {(each.source, each.target, each.port, each.outcome) for each in found.ways}
    assert ways == {(a, 1 - a, port, "ok") for a in (0, 1) for port in (29500, 29501, 0)}
    assert {(each.source, each.target, each.claimed, each.large, each.rate) for each in found.flows} == {
        (a, 1 - a, 1000, True, 8e8) for a in (0, 1)
    }
    assert [(each.node, each.flops) for each in found.powers] == [(0, 1e9), (1, 1e9)]
    assert measured(found.speeds) == all_measured((0,), (1,), (0, 1))
    alone, pair = nodes[1].sent_of(MeasureCollective)
    assert (alone.address, alone.first, alone.count, alone.world_size) == ("", 0, 2, 2)
    assert (pair.address, pair.port, pair.first, pair.count, pair.world_size) == ("10.0.0.0", 40000, 1, 1, 2)
    assert progress[0] == "examining 2 nodes"
    assert "testing connectivity between the nodes" in progress


def test_a_slow_stream_is_sent_again():
    rates = iter([1e6, 2e6, 1e6])
    found, _ = examine(Node(0), Node(1, SendStream=lambda _: messages.StreamReply(StreamResult(True, next(rates)))))
    assert ([flow.rate for flow in found.flows], [*rates]) == ([8e8, 2e6], [])


def test_one_machine_is_not_tested_for_connections():
    node = Node(0)
    found, progress = examine(node)
    assert (found.ways, found.flows, measured(found.speeds)) == ((), (), {(0, "all_reduce")})
    assert progress == ["examining this machine", "measuring all_reduce"]
    assert not node.sent_of(messages.ListenOnPorts)


@pytest.mark.parametrize("request_name", ["DescribeNode", "GetTime", "ListenOnPorts", "PrepareDevices"])
def test_a_lost_node_is_excluded_and_the_others_are_measured(request_name):
    found, _ = examine(Node(0), Node(1, **{request_name: None}), Node(2))
    assert [each.trouble for each in found.nodes] == [None, "its connection closed", None]
    assert measured(found.speeds) == all_measured((0,), (2,), (0, 2))


@pytest.mark.parametrize(
    ("replies", "groups"),
    [
        ({"ConnectTo": ("10.0.0.0",)}, [(0,), (1,), (2,), (0, 2), (1, 2)]),  # no path to node 0
        ({"PingNode": PingResult(1e-4, 1000, 31)}, [(0,), (1,), (2,), (0, 2)]),  # losses on all its paths
        ({"PrepareDevices": messages.PrepareReply((), "no torch")}, [(0,), (2,), (0, 2)]),
        ({"MeasureCollective": CollectiveTimes(error="broken")}, [(0,), (2,), (0, 2)]),
        ({"DescribeNode": replace(FACTS, unknown_interfaces=("GLOO_SOCKET_IFNAME=eth7",))}, [(0,), (2,), (0, 2)]),
        (
            {"DescribeNode": replace(FACTS, unknown_interfaces=("TP_SOCKET_IFNAME=x",))},
            [*ALONE, (0, 1), (0, 2), (1, 2)],
        ),
    ],
)
def test_pairs_with_a_fault_are_not_measured(replies, groups):
    found, _ = examine(Node(0), Node(1, **replies), Node(2))
    assert measured(found.speeds) == all_measured(*groups)


def test_the_route_of_node_0_to_its_own_loopback_is_replaced():
    """Debian maps the name of a machine to 127.0.1.1."""
    own = replace(FACTS, link=RouteToNodeZero("127.0.1.1", "lo"))
    link = RouteToNodeZero("10.0.0.0", "eth0")
    found, _ = examine(Node(0, DescribeNode=own, FindRoute=messages.RouteReply(link)), Node(1))
    assert found.nodes[0].facts.link == link
    found, _ = examine(Node(0, DescribeNode=own))
    assert found.nodes[0].facts.link.address == "127.0.1.1"


def test_thorough_measures_all_nodes_at_once_and_each_rail():
    nodes = [Node(number, has_route=number < 2) for number in range(3)]
    found, progress = examine(*nodes, kind=ThoroughExaminer)
    everywhere = {(0, 1, 2, name) for name in (*COLLECTIVES, f"all_reduce over {RAIL}")}
    assert measured(found.together) == everywhere
    assert [(each.network, {end[2] for end in each.outcomes}) for each in found.rails] == [(RAIL, {"ok"})]
    assert {(a, b) for a, b, _ in found.rails[0].outcomes} == {(a, b) for a in range(3) for b in range(3) if a != b}
    *_, large, over_rail = nodes[1].sent_of(MeasureCollective)
    assert (large.first, large.count, large.world_size, large.max_tensor_bytes) == (1, 1, 3, 8 * GIB // 16)
    assert (over_rail.address, over_rail.port, over_rail.max_tensor_bytes) == ("192.168.0.0", 40000, SIZES[-1])
    prepared = nodes[1].sent_of(PrepareDevices)[-1]
    assert (prepared.devices, prepared.interface, prepared.force_interface) == (("cpu",), "eth1", True)
    assert "measuring all_to_all of all nodes at once" in progress


def test_thorough_on_one_machine_measures_larger_tensors():
    found, progress = examine(Node(0), kind=ThoroughExaminer)
    assert measured(found.together) == all_measured((0,), names=COLLECTIVES)
    assert (found.rails, "measuring all_to_all of larger tensors" in progress) == ((), True)


@pytest.mark.parametrize(
    ("gpus", "groups"), [((4, 4), [(0, 1), (0,), (1,)]), ((4, 1), [(0, 1), (0,)]), ((4, 0), [(0,)]), ((4,), [(0,)])]
)
def test_thorough_measures_the_gpus_of_each_node_too(gpus, groups):
    nodes = [Node(number, count) for number, count in enumerate(gpus)]
    found, _ = examine(*nodes, kind=ThoroughExaminer)
    assert {each for each in measured(found.together) if RAIL not in each[-1]} == all_measured(
        *groups, names=COLLECTIVES
    )
    assert len(measured(found.together)) == len(found.together)
    assert nodes[0].sent_of(MeasureCollective)[-1 - (len(gpus) > 1)].count == 4


@pytest.mark.parametrize(
    ("replies", "groups"),
    [({"ConnectTo": ("10.0.0.2",)}, [(0,)]), ({"PingNode": None}, [(0, 2)])],
)
def test_thorough_leaves_out_nodes_with_a_fault(replies, groups):
    found, _ = examine(Node(0), Node(1, **replies), Node(2), kind=ThoroughExaminer)
    assert {each.nodes for each in found.together if RAIL not in each.name} == set(groups)


def prepare(reply: messages.PrepareReply | None):
    """Reply so only for a rail, for which gloo's interface is forced."""
    well = messages.PrepareReply((DeviceThroughput("cpu", 1e9),))
    return lambda question: reply if question.force_interface else well


@pytest.mark.parametrize(
    "replies",
    [
        {"ConnectTo": ("192.168.0.2",)},
        {"PrepareDevices": prepare(messages.PrepareReply((), "no such interface"))},
        {"PrepareDevices": prepare(None)},
    ],
)
def test_a_rail_with_a_fault_is_not_measured(replies):
    found, _ = examine(Node(0), Node(1, **replies), Node(2), kind=ThoroughExaminer)
    assert not [each for each in found.together if RAIL in each.name]
    assert [each.network for each in found.rails] == [RAIL]
