"""Tests of the findings about one machine, with made-up facts."""

import itertools

import pytest
from msgspec.structs import replace

from ddplaunch.features.doctor.checks import network
from ddplaunch.features.doctor.examination import (
    CollectiveResult,
    DeviceResult,
    DoctorResults,
    ExaminedNode,
    PathResult,
    Rail,
)
from ddplaunch.features.doctor.findings import find_all
from ddplaunch.features.doctor.node_facts import RouteToNodeZero, TorchInfo
from ddplaunch.system.devices.gpu_health import GpuHealth
from ddplaunch.system.plan.hardware import LostGpu
from tests.features.doctor.facts import FACTS, describe_findings
from tests.features.doctor.findings import CPU_LIMIT, ITSELF, NO_GPU_ANSWER, NO_LOOPBACK

TORCH = TorchInfo("2.13.0", cuda="13.0", nccl="2.28", devices=4)


def gpus(*indices):
    return tuple(GpuHealth(index, "H100", "570.86.15", None, None, ()) for index in indices)


def measured(slow, count=3):
    """Each node's CPU and each pair, where those with a node of ``slow`` are slow."""
    powers = tuple(DeviceResult(node, "cpu", 8e9 if node in slow else 95e9) for node in range(count))
    pairs = itertools.combinations(range(count), 2)
    times = {True: (1e-4, 1e-2, 1e-1), False: (1e-4, 1e-3, 1e-2)}
    return {
        "powers": powers,
        "speeds": tuple(CollectiveResult(pair, 2, "gloo", times[not slow.isdisjoint(pair)]) for pair in pairs),
    }


def test_one_machine_under_two_names():
    """One machine under two names is a finding; that its port is in use is none, as the doctor itself has it."""
    machine = replace(FACTS, machine="boot net pid")
    taken = ExaminedNode("10.0.0.1", machine, taken={29500: "Address already in use"})
    found = DoctorResults((ExaminedNode("n0", FACTS), ExaminedNode("n1", machine), taken), ())
    assert [(each.subject, each.text) for each in find_all(found)] == [("10.0.0.1", "same machine as n1")]


def test_a_lost_gpu_is_the_one_finding():
    """A lost GPU is reported alone, without CUDA's failure and without the different number of GPUs."""
    well = replace(FACTS, torch=TORCH, gpus=gpus(0, 1, 2, 3))
    why_not = "CUDA unknown error"
    lost = replace(well, torch=replace(TORCH, devices=0, why_not=why_not), gpus=gpus(0, 2, 3))
    assert describe_findings(well, replace(lost, lost_gpus=(LostGpu(1, "GPU is lost"),))) == [
        f"error n1 GPU 1: {NO_GPU_ANSWER}: GPU is lost"
    ]


def test_a_variable_that_names_no_interface_is_the_one_finding():
    """Collectives that fail because of it are not listed, nor is an innocent peer."""
    wrong = replace(
        FACTS,
        unknown_interfaces=("GLOO_SOCKET_IFNAME=eth7",),
        network_variables=(("GLOO_SOCKET_IFNAME", "eth7"), ("NCCL_IB_TIMEOUT", "22")),
    )
    usual = replace(FACTS, network_variables=(("NCCL_HOSTID", "a"), ("NCCL_IB_TIMEOUT", "22")))
    failed = tuple(CollectiveResult(nodes, 2, "gloo", error="no address") for nodes in ((1,), (0, 1)))
    assert describe_findings(usual, wrong, speeds=failed) == ["error n1: GLOO_SOCKET_IFNAME=eth7: no such interface"]


def test_variables_of_nccl_that_differ_are_one_finding_each():
    first, second, third = (
        replace(FACTS, network_variables=tuple(each.items()))
        for each in (
            {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"},
            {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_HOSTID": "b"},
            {"NCCL_SOCKET_IFNAME": "ens5"},
        )
    )
    assert describe_findings(first, second, third) == [
        "warning n2: NCCL_P2P_DISABLE differs: 1 on n0 and n1; not set on n2",
        "note n2: NCCL_SOCKET_IFNAME differs: eth0 on n0 and n1; ens5 on n2",
    ]


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({"load": 25.0}, "busy: 25 runnable processes on 2 CPUs"),
        ({"quota": 0.25}, f"{CPU_LIMIT} 0.25 of 2 CPUs"),
    ],
)
def test_a_node_without_cpu_time_is_reported_as_busy_and_not_as_slow(held, text):
    assert describe_findings(FACTS, FACTS, replace(FACTS, **held), **measured({2})) == [f"warning n2: {text}"]


BUSY = replace(FACTS, load=25.0)
ALONE = {"powers": (DeviceResult(0, "cpu", 8e9), DeviceResult(0, "cpu", 95e9))}
BY_LOOPBACK = replace(FACTS, link=RouteToNodeZero("127.0.0.1", "lo", 65536, there="127.0.1.1"))
"""Debian's 127.0.1.1, by which node 0 may know itself."""


@pytest.mark.parametrize(
    ("facts", "measurements", "findings"),
    [
        ([FACTS, FACTS], {}, []),
        ([BUSY], ALONE, ["warning n0: busy: 25 runnable processes on 2 CPUs"]),
        ([BUSY] * 3, measured({2}), [  # of nodes that are all busy one may be slow for another reason
            "warning n0, n1 and n2: busy: 25 runnable processes on 2 CPUs",
            "warning n2: all_reduce with any other node runs at 160 MiB/s; the best pair at 1.6 GiB/s"]),
        ([BY_LOOPBACK, FACTS], {}, []),
        ([FACTS, BY_LOOPBACK], {}, [f"error n1: {ITSELF} (127.0.0.1)"]),
        ([replace(FACTS, loopback="gets no answer")], {}, ["error n0: " + NO_LOOPBACK]),
    ],
)  # fmt: skip
def test_findings_about_load_and_loopback_addresses(facts, measurements, findings):
    assert describe_findings(*facts, **measurements) == findings


def test_findings_across_nodes():
    link = FACTS.link
    facts = [replace(FACTS, torch=TORCH, gpus=gpus(0)) for _ in range(7)]
    facts[2] = replace(facts[2], python="3.12.1", link=replace(link, mtu=9000))
    facts[3] = replace(facts[3], link_error="the name n0 does not resolve", torch=replace(TORCH, nccl="2.27"))
    nodes = [ExaminedNode(f"n{node}", each) for node, each in enumerate(facts)]
    nodes[0] = replace(nodes[0], taken={29500: "in use"})
    nodes[1] = replace(nodes[1], clock=-1.5, taken={29501: "in use"})
    nodes[2] = replace(nodes[2], clock=1.0)
    nodes[4] = replace(nodes[4], clock=1.1, trouble="its connection closed", check="ssh n4 true")
    together = [CollectiveResult((0, 1, 2), 3, "gloo", error=error) for error in ("broken", "gloo does not support it")]
    together.append(CollectiveResult((0, 1, 2), 3, "gloo", (1e-4, 1e-1, 1)))
    alone = CollectiveResult((5,), 2, "gloo", error="no memory")
    speeds = (alone, *measured(set(), 3)["speeds"])
    outcomes = [(a, b, "silent" if a == b + 1 else "ok") for a in range(7) for b in range(7) if a != b]
    rail = Rail("10.1.0.0/24", {0: "eth1", 1: "eth2"}, {}, tuple(outcomes))
    found = DoctorResults(tuple(nodes), (29500,), speeds=speeds, together=tuple(together), rails=(rail,))
    over = "a connection over 10.1.0.0/24 (eth1, eth2) gets no answer"
    assert [f"{each.severity.value} {each.subject}: {each.text}" for each in find_all(found)] == [
        "error n4: stopped responding: its connection closed",
        "error n5: all_reduce of its 2 devices failed (gloo): no memory",
        "error all nodes at once: all_reduce failed (gloo): broken",
        "error n2: Python differs: 3.11 on n0, n1, n3, n4, n5 and 1 more; 3.12 on n2",
        "error n3: NCCL differs: 2.28 on n0, n1, n2, n4, n5 and 1 more; 2.27 on n3",
        "error n3: the name n0 does not resolve",
        "error n0: cannot listen on port 29500: in use",
        "warning all nodes at once: all_reduce runs at 21 MiB/s; the slowest pair at 1.6 GiB/s",
        "warning n1: its clock is 1.5 s behind that of n0",
        "warning n4: its clock is 1.1 s ahead of that of n0",
        "warning network: the MTU of the interfaces differs: 1500 on n0, n1, n3, n4, n5 and 1 more; 9000 on n2",
        *(f"warning n{node + 1} to n{node}: {over}" for node in range(3)),
        f"warning network: 3 more paths where {over}",
        "note n1: cannot listen on port 29501: in use",
    ]


@pytest.mark.parametrize(("reported", "speed"), [(25_000, 25_000), (-1, None), (0, None), (None, None)])
def test_an_interface_may_report_no_speed(monkeypatch, reported, speed):
    monkeypatch.setattr(network, "read_int", lambda path: reported)
    assert network.read_network("127.0.0.1").link.speed == speed


def test_a_host_that_has_no_route_is_the_one_finding():
    """Its replies have no route either, so connections to it get no answer: no firewall is to blame."""
    ways = [PathResult(source, target, 29500, "ok", 0.001) for source, target in itertools.permutations(range(4), 2)]
    outcomes = {(3, 2): "unreachable", (2, 3): "silent"}
    ways = tuple(replace(each, outcome=outcomes.get((each.source, each.target), "ok")) for each in ways)
    assert describe_findings(*[FACTS] * 4, ways=ways) == ["error n3 to n2: a connection has no route"]
    one_way = tuple(replace(each, outcome="ok") if each.source == 3 else each for each in ways)
    assert describe_findings(*[FACTS] * 4, ways=one_way) == ["error n2 to n3: a connection gets no answer"]


def test_a_host_without_ddplaunch_gets_the_option_for_its_python():
    trouble = "ddplaunch is not installed for the Python on that host (--remote-python selects another)"
    found = DoctorResults(
        (ExaminedNode("n0", FACTS), ExaminedNode("n1", None, trouble=trouble, check="ssh n1 true")), ()
    )
    assert [each.hint.partition(":")[0] for each in find_all(found) if each.subject == "n1"] == ["--remote-python PATH"]
