"""Tests of what nodes measure between them, over the loopback, and of how nodes that a user starts join."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError, UsageError, host_name
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import encode
from ddplaunch.core.messages import PROTOCOL_VERSION, JoinAccepted, JoinDeclined, JoinRefused, NodeHello, Welcome
from ddplaunch.features.doctor import connectivity, manual_rendezvous
from ddplaunch.features.doctor.bisect_command import fold_hosts
from ddplaunch.features.doctor.connectivity import (
    NONCE_BYTES,
    PingResult,
    measure_ping,
    measure_stream,
    new_nonce,
)
from ddplaunch.features.doctor.manual_rendezvous import RUN_ID, ManualRendezvous
from ddplaunch.features.doctor.peers import DoctorPeer
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions
from tests.conftest import free_port, write_program

HERE = "127.0.0.1"


def test_a_path_carries_small_and_large_packets(monkeypatch):
    for name in ("CONNECT_TIMEOUT_S", "SMALL_REPLY_TIMEOUT_S", "LARGE_REPLY_TIMEOUT_S", "_EXCHANGE_TIMEOUT_S"):
        monkeypatch.setattr(connectivity, name, 60.0)
    nonce = new_nonce()
    assert len(nonce) == NONCE_BYTES
    with socket.create_server((HERE, 0)) as other, socket.create_server((HERE, 0)) as stranger:
        other.close()
        taken, closed = stranger.getsockname()[1], free_port()
        listener = connectivity.TestListener((taken,), nonce)
        assert listener.listening.taken == ((taken, "Address already in use"),)
        way = HERE, listener.listening.any_port
        paths = [way, (HERE, closed), ("not an address", 7)]
        tried = connectivity.try_connections(paths, nonce)
        assert [each.outcome for each in tried] == ["ok", "refused", "unreachable"]
        assert [each.seconds is not None for each in tried] == [True, False, False]
        assert connectivity.try_connections([way], new_nonce())[0].outcome == "stranger"
        found = measure_ping(way, nonce)
        assert 0 < found.seconds < 30
        assert found.sent >= 300 > found.lost
        assert measure_ping((HERE, closed), nonce) == PingResult(None, 0, 0)
        stream = measure_stream(way, nonce)
        assert (stream.large, stream.rate > 1e6) == (True, True)
        assert measure_stream((HERE, closed), nonce) is None
        monkeypatch.setattr(connectivity, "LARGE_REPLY_TIMEOUT_S", 0.01)
        monkeypatch.setattr(connectivity, "_receive_stream", lambda connection: connection.recv(1, socket.MSG_WAITALL))
        assert measure_stream(way, nonce).large is False
        listener.close()
        assert connectivity.try_connections([way], nonce)[0].outcome == "refused"


HELLO = NodeHello(NodeSpec(1, "n1", ("cpu",)), "3", RUN_ID, "doctor", None, 0, Versions(""), ())


def test_node_0_refuses_a_node_of_another_group():
    loop, port = EventLoop(), free_port()
    meeting = ManualRendezvous(loop, port, 3, None)
    with pytest.raises(UsageError, match=f"cannot use port {port}, the one after --master-port: Address already in"):
        ManualRendezvous(loop, port, 3, None)
    with socket.create_connection((HERE, port)) as path:  # whose packets pass where those of full size are lost
        assert path.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1000
    refusals = {
        HELLO: None,
        JoinDeclined(1, "n1", "broken", None, "train"): "it belongs to a job, and node 0 runs ddplaunch doctor",
        replace(HELLO, run_id="train"): "it belongs to a job, and node 0 runs ddplaunch doctor",
        replace(HELLO, nnodes="2"): "it has --nnodes 2, and node 0 has --nnodes 3",
        replace(HELLO, node_spec=NodeSpec(0, "n1", ("cpu",))): "node rank 0 is not among 1 to 2",
        replace(HELLO, node_spec=NodeSpec(3, "n1", ("cpu",))): "node rank 3 is not among 1 to 2",
    }
    assert {hello: meeting._why_refused(hello) for hello in refusals} == refusals
    meeting._joined[1] = DoctorPeer(loop, "n1")
    assert meeting._why_refused(HELLO) == "node 1 has already joined: n1"
    first, second = meeting.wait_for_nodes(0.0, lambda rank: f"check {rank}")
    assert (first.name, first.error, first.check_command) == ("n1", None, "check 1")
    assert (second.name, second.error) == ("node 2", "no connection within 0 s (--join-timeout)")


WELCOME, OWN_NAME = Welcome(PROTOCOL_VERSION, "1"), NodeSpec(1, host_name(), ("cpu",)).name
ACCEPTED, LATE = JoinAccepted(RUN_ID, 15.0), "cannot reach node 0 within 0 s (--join-timeout): {}: "


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ((Welcome(7, "1"),), "node 0 runs another version of ddplaunch"),
        ((WELCOME, JoinRefused(f"node 0 refuses {OWN_NAME}: no token")), "node 0 refuses this node: no token"),
        ((WELCOME, replace(ACCEPTED, proof="forged")), "node 0 does not know the token"),
        ((), f"{LATE}the connection is accepted, but not by ddplaunch doctor"),
        (None, f"{LATE}connection refused"),
        ((WELCOME, ACCEPTED), "node 0 ({}) closed the connection before its report was complete"),
    ],
)
def test_a_node_that_cannot_join_names_the_reason(monkeypatch, messages, refusal):
    """Node 0 starts once the node has reported that it waits, or before where it does not wait."""
    port, notes, waits = free_port(), [], LATE not in refusal
    where, token = f"{HERE}:{port}", None if "closed" in refusal else "secret"

    def reply(listening):
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"".join(map(encode, messages)))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    def begin(note="no note"):
        notes.append(note)
        if len(notes) == 1 and messages is not None:
            pool.submit(reply, stack.enter_context(socket.create_server((HERE, port))))

    def respond(connection):
        """A node 0 that loses power meanwhile is noticed within 30 s."""
        with connection:
            idle, interval, count = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert (idle + interval * count <= 30, connection.gettimeout()) == (True, None)
        return 69

    monkeypatch.setattr(manual_rendezvous, "_run_responder", respond)
    for name, seconds in (("GREETING_TIMEOUT_S", 60.0), ("_CONNECT_TIMEOUT_S", 60.0), ("RETRY_DELAY_S", 0.001)):
        monkeypatch.setattr(manual_rendezvous, name, seconds)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        _ = waits or begin()
        with pytest.raises(LaunchError, match=re.escape(refusal.format(where))):
            manual_rendezvous.join(HERE, port, 1, 2, token, 60.0 if waits else 0.0, begin)
    waiting = f"waiting for node 0 (up to 60 s): {where}: connection refused" if waits else "no note"
    joined = f"node 1 of 2 has joined node 0 at {where}, which prints the report"
    assert notes == [waiting, *([joined] if "closed" in refusal else [])]


def test_an_error_without_a_text_is_named_by_its_class(monkeypatch):
    """As where no address is found for a name: the error has no number."""

    def refuse(*_):
        raise OSError("getaddrinfo returns an empty list")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(LaunchError, match=f"{HERE}:1: oserror"):
        manual_rendezvous.join(HERE, 1, 1, 2, None, 0.0, list[str]().append)


@pytest.mark.ci
def test_two_nodes_on_one_machine_that_a_user_starts(start_ddplaunch, tmp_path):
    write_program(tmp_path / "modules", "torch.py", "raise ImportError('not today')\n")  # nothing is measured
    words = ("--nnodes", "2", "--master-addr", HERE, "--master-port", str(free_port()), "--json")
    env = {"PYTHONPATH": str(tmp_path / "modules"), "DDPLAUNCH_TOKEN": "secret"}
    other, node_0 = (start_ddplaunch("doctor", *words, "--node-rank", rank, env=env) for rank in "10")
    assert (node_0.wait(), other.wait()) == (1, 1), node_0.stderr()
    found = json.loads(node_0.stdout())
    host = socket.gethostname()
    assert [(each["name"], each["trouble"]) for each in found["nodes"]] == [(host, None), (f"{host} (node 1)", None)]
    assert {(each["source"], each["target"], each["outcome"]) for each in found["ways"]} == {
        (0, 1, "ok"),
        (1, 0, "ok"),
    }
    assert {(each["source"], each["target"]) for each in found["flows"]} == {(0, 1), (1, 0)}
    assert [each for each in found["findings"] if "not today" in each["text"]]
    assert "node 1 of 2 has joined node 0" in other.stderr()


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        (["n2", "n3", "n4", "n7"], "n[2-4],n7"),
        (["n08", "n09", "n10", "n9"], "n[08-10],n9"),
        (["a1", "a2", "login", "::1", "n1x", "n2x", "n3x"], "a1,a2,login,::1,n[1-3]x"),
        ([f"n{number}" + "0" * 9 for number in (1, 2, 3)], "n1000000000,n2000000000,n3000000000"),
    ],
)
def test_consecutive_hosts_are_a_range(hosts, folded):
    assert fold_hosts(hosts) == folded
