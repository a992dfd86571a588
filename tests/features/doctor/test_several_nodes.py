"""Tests of ``ddplaunch doctor --nnodes``, typed on each of several virtual hosts, with faults between them."""

import json
import signal

import pytest

from tests.features.doctor.doctor_command import DoctorCommand
from tests.features.doctor.findings import LARGE_LOST
from tests.skewed_clock import skewed_environment

pytestmark = [pytest.mark.ci, pytest.mark.slow]


@pytest.fixture
def hosts(network):
    return network(3).hosts


@pytest.fixture
def doctor(hosts, tmp_path):
    """Type it on a host."""

    def begin(rank, *words, nnodes=2, env=None):
        place = ("--nnodes", nnodes, "--node-rank", rank, "--master-addr", "n0")
        return DoctorCommand(hosts[rank], tmp_path, *place, *words, env=env)

    return begin


def test_two_nodes_with_a_token_two_clocks_and_a_path_that_drops_large_packets(doctor, hosts, tmp_path):
    hosts[1].drop_large(hosts[0])
    first = doctor(0, env={"DDPLAUNCH_TOKEN": "secret"})
    first.wait_for_line("waiting for node 1 on port 29501 (up to 60 s)")
    code, out, err = doctor(1, env={"DDPLAUNCH_TOKEN": "another"}).end()
    assert (code, out) == (2, "")
    assert "Error: node 0 refuses this node: its token differs\n" in err
    other = doctor(1, env={"DDPLAUNCH_TOKEN": "secret", **skewed_environment(tmp_path, 50)})
    code, found, result = first.read_result()
    assert code == 1
    assert [each["name"] for each in found["nodes"]] == ["n0", "n1"]
    assert sorted(result) == [
        f"n1 to n0: {LARGE_LOST}",
        "n1: its clock is 50.0 s ahead of that of n0",
    ]
    line = "ddplaunch: node 1 of 2 has joined node 0 at n0:29501, which prints the report\n"
    assert other.end() == (1, "", line)
    assert {each["outcome"] for each in found["ways"]} == {"ok"}
    assert [(each["source"], each["target"]) for each in found["flows"] if not each["large"]] == [(1, 0)]
    assert sorted(each["nodes"] for each in found["speeds"]) == [[0], [1]]
    assert "secret" not in json.dumps(found)


def test_a_closed_port_and_ctrl_c_while_node_0_waits(doctor, hosts):
    hosts[1].drop_port(29501)
    first, other, closed = doctor(0, nnodes=3), doctor(2, nnodes=3), doctor(1, "--join-timeout", "6", nnodes=3)
    code, out, err = closed.end()
    assert (code, out) == (1, "")
    assert "ddplaunch: waiting for node 0 (up to 6 s): n0:29501: no answer\n" in err
    assert "Error: cannot reach node 0 within 6 s (--join-timeout): n0:29501: no answer\n" in err
    other.wait_for_line("has joined node 0")
    first.process.send_signal(signal.SIGINT)
    assert first.end()[0] == 130
    assert other.end()[0] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c(doctor, rank):
    first, other = doctor(0), doctor(1)
    first.wait_for_line(("examining 2 nodes", "measuring all_reduce")[rank])
    pressed = (first, other)[rank]
    pressed.process.send_signal(signal.SIGINT)
    code, out, _ = pressed.end()
    assert (code, out) == (130, "")
    if rank:
        code, _, found = first.read_result()
        assert (code, found) == (1, ["n1: stopped responding: its connection closed"])
    else:
        code, _, err = other.end()
        assert code == 1
        assert "Error: node 0 (n0:29501) closed the connection before its report was complete\n" in err
