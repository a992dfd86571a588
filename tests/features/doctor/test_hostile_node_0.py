"""Tests of a node of ``doctor --nnodes`` that meets a program which pretends to be node 0."""

import json
import os
import socket

import pytest

from ddplaunch.base.types import encode
from ddplaunch.core.messages import PROTOCOL_VERSION, JoinAccepted, Welcome
from ddplaunch.features.doctor.manual_rendezvous import RUN_ID
from ddplaunch.features.doctor.messages import DescribeNode, Exit, GetTime
from tests.conftest import write_program
from tests.scaled_timeouts import scaled_timeout

pytestmark = pytest.mark.slow


@pytest.fixture
def false_node_0(start_ddplaunch):
    """Accept a node without checks; return its process, and functions that send to it and receive from it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1] - 1
        place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
        process = start_ddplaunch("doctor", *place)
        listening.settimeout(scaled_timeout(20))
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as stream:
            connection.settimeout(scaled_timeout(60))

            def send(message):
                connection.sendall(encode(message))

            def receive():
                message = json.loads(stream.read(int.from_bytes(stream.read(4), "big")))
                return message["op"], message

            send(Welcome(PROTOCOL_VERSION, "1"))
            name, hello = receive()
            assert (name, hello["node_spec"]["node_rank"]) == ("NodeHello", 1)
            send(JoinAccepted(RUN_ID, 15.0))
            assert receive()[0] == "Ready"
            yield process, send, receive
        process.wait(20)


def test_node_0_cannot_choose_the_python_and_the_path_of_a_node(false_node_0, tmp_path):
    process, send, receive = false_node_0
    write_program(tmp_path, "torch.py", "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    send(DescribeNode(b"/proc/nowhere", "127.0.0.1", (b"PYTHONPATH=" + os.fsencode(tmp_path),), ""))
    name, facts = receive()
    here = [each for each in facts["folders"] if each["what"] == "the current folder"]
    assert (name, [each["error"] for each in here]) == ("NodeFacts", [None])
    assert facts["torch"]
    assert "ran" not in os.listdir(tmp_path)
    send(GetTime())
    assert receive()[0] == "TimeReply", "it does not end by itself"
    send(Exit(1))
    assert process.wait(10) == 1


def test_an_unexpected_request_of_node_0_ends_the_node_with_an_error(false_node_0):
    process, send, _ = false_node_0
    send(Welcome(PROTOCOL_VERSION, "1"))
    assert process.wait(20) == 1
    assert "sent a request that this version cannot read\n  use the same version on all nodes\n" in process.stderr()
