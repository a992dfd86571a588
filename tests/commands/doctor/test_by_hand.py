"""``ddplaunch doctor --nnodes``: typed on each of several virtual hosts, with faults between them."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.commands.doctor.test_hosts import OF_LOAD
from tests.conftest import clean_environment, command, wait_until, write
from tests.patience import patience
from tests.skewed_clock import skewed

pytestmark = [pytest.mark.ci, pytest.mark.slow]


class Typed:
    """The command on one host."""

    def __init__(self, host, rank, nnodes, folder, words, env):
        shared = ("--nnodes", nnodes, "--node-rank", rank, "--master-addr", "n0", "--json")
        self.host = host
        self.process = host.type(command("doctor", *shared, *words), folder, clean_environment(env))

    def says(self, text):
        """Wait for a line of stderr with this text."""
        for line in self.process.stderr:
            if text in line:
                return
        pytest.fail(f"it ended without {text!r}: {self.process.wait()}")

    def end(self):
        """The exit code, and what came on stdout and, unread so far, on stderr; nothing else of it is left."""
        out, err = self.process.communicate(timeout=patience(100))
        wait_until(lambda: not self.host.find("ddplaunch"), f"the end of what was started on {self.host}")
        return self.process.returncode, out, err

    def found(self):
        """Of node 0: the exit code, the answer, and its findings but those of a busy machine."""
        code, out, err = self.end()
        assert out, err
        found = json.loads(out)
        said = [f"{each['subject']}: {each['text']}" for each in found["findings"]]
        return code, found, [each for each in said if not any(word in each for word in OF_LOAD)]


@pytest.fixture
def hosts(network):
    return network(3).hosts


@pytest.fixture
def doctor(hosts, tmp_path):
    """Type it on a host."""

    def begin(rank, *words, nnodes=2, env=None):
        return Typed(hosts[rank], rank, nnodes, tmp_path, words, env)

    return begin


def test_two_nodes_with_a_token_two_clocks_and_a_path_that_drops_large_packets(doctor, hosts, tmp_path):
    hosts[1].drop_large(hosts[0])
    first = doctor(0, env={"DDPLAUNCH_TOKEN": "secret"})
    first.says("waiting for node 1 at port 29501 (60 s at most)")
    code, out, err = doctor(1, env={"DDPLAUNCH_TOKEN": "another"}).end()
    assert (code, out) == (2, "")
    assert "Error: node 0 refuses this node: its token differs\n" in err
    other = doctor(1, env={"DDPLAUNCH_TOKEN": "secret", **skewed(tmp_path, 50)})
    code, found, said = first.found()
    assert code == 1
    assert [each["name"] for each in found["nodes"]] == ["n0", "n1"]
    assert sorted(said) == [
        "n1 to n0: a connection works, but packets of full size are lost on the way",
        "n1: its clock is 50.0 s ahead of that of n0",
    ]
    line = "ddplaunch: node 1 of 2 answers node 0 at n0:29501, which prints the page\n"
    assert other.end() == (1, "", line)
    assert "secret" not in json.dumps(found)


def test_a_node_that_does_not_come(doctor):
    first = doctor(0, "--join-timeout", "4", nnodes=3)
    other = doctor(1, nnodes=3)
    code, found, said = first.found()
    assert code == 1
    assert said == ["node 2: it did not take part: it did not connect in 4 s (--join-timeout)"]
    (absent,) = [each for each in found["findings"] if each["subject"] == "node 2"]
    assert absent["hint"].endswith("ddplaunch doctor --nnodes 3 --node-rank 2 --master-addr n0 --master-port 29500")
    assert {tuple(each["nodes"]) for each in found["speeds"]} == {(0,), (1,), (0, 1)}
    assert other.end()[0] == 1


def test_the_port_is_closed(doctor, hosts):
    hosts[1].drop_port(29501)
    first, other = doctor(0, "--join-timeout", "6"), doctor(1, "--join-timeout", "6")
    code, out, err = other.end()
    assert (code, out) == (1, "")
    assert "ddplaunch: waiting for node 0 (6 s at most): n0:29501: no answer\n" in err
    assert "Error: node 0 was not reached in 6 s (--join-timeout): n0:29501: no answer\n" in err
    code, _, said = first.found()
    assert code == 1
    assert said == ["node 1: it did not take part: it did not connect in 6 s (--join-timeout)"]


STRANGERS = """
import socket, sys
from ddplaunch.control.messages import Hello, Joined, Versions, Welcome
from ddplaunch.wire.typed import encode
from ddplaunch.commands.doctor.messages import Describe, Present
from ddplaunch.plan.share import Share

def read(sock):
    return sock.recv(int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big"), socket.MSG_WAITALL)

silent = [socket.create_connection(("n0", 29501)) for _ in range(40)]
loud = socket.create_connection(("n0", 29501))
try:
    loud.sendall(b"GET / HTTP/1.1\\r\\n" * 10000)
except OSError:
    pass
guest = socket.create_connection(("n0", 29501))
hello = Hello(Share(2, "n2", ("cpu",)), "3", "ddplaunch doctor", "", None, 0, Versions(""), ())
print(read(guest), flush=True)
guest.sendall(encode(hello))
print(read(guest), flush=True)
guest.sendall(encode(Present(sys.argv[1])))
print(read(guest), flush=True)
answer = b'{"op":"NodeFacts","body":{"cpus":' + b"9" * 400 + b"}}"
guest.sendall(len(answer).to_bytes(4, "big") + answer)
guest.recv(1)
"""


def test_strangers(doctor, hosts, tmp_path):
    from ddplaunch import __version__

    first = doctor(0, nnodes=3)
    first.says("waiting for node 1, 2")
    program = write(tmp_path, "strangers.py", STRANGERS)
    stranger = hosts[2].start([sys.executable, program, __version__])
    first_other = doctor(1, nnodes=3)
    code, _, said = first.found()
    assert code == 1
    assert said == ["n2: it did not take part: ddplaunch cannot read the answer of this host"]
    assert first_other.end()[0] == 1
    assert stranger.wait(patience(10)) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c(doctor, rank):
    first, other = doctor(0), doctor(1)
    first.says("measuring all_reduce")
    pressed = (first, other)[rank]
    pressed.process.send_signal(signal.SIGINT)
    code, out, _ = pressed.end()
    assert (code, out) == (130, "")
    if rank:
        code, _, said = first.found()
        assert (code, said) == (1, ["n1: it stopped answering: its connection closed"])
    else:
        code, _, err = other.end()
        assert code == 1
        assert "Error: node 0 (n0:29501) closed the connection before its page was complete\n" in err


def test_ctrl_c_while_it_waits(doctor):
    first, other = doctor(0, nnodes=3), doctor(2, nnodes=3)
    other.says("answers node 0")
    first.process.send_signal(signal.SIGINT)
    assert first.end()[0] == 130
    assert other.end()[0] == 1
