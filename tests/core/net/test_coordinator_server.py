"""Replays of node 0's control port, with nodes that the test plays, and timers that it lets expire."""

from __future__ import annotations

import socket

import pytest

from ddplaunch.core import messages
from ddplaunch.core.messages import NodeLost, NoteMessage, StartAttempt, StopAttempt
from ddplaunch.core.net.coordinator_server import LINGER_S, CoordinatorServer
from ddplaunch.core.net.listener import HELLO_TIMEOUT_S
from tests.core.job.job_steps import Job
from tests.core.job_configs import make_job_config
from tests.core.net.fake_peer import PYTHON, FakePeer, ManualLoop, make_hello, make_node_spec


class World:
    """Node 0 of a job of two nodes, and the messages that it gets itself."""

    def __init__(self, **changed) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        config = {"address": "127.0.0.1", "port": self.sock.getsockname()[1], "min_nodes": 2, "max_nodes": 2}
        self.loop, self.received, self.peers = ManualLoop(), [], []
        self.config = make_job_config(**{"inspect": False, "heartbeat_timeout": 20.0, **config, **changed})
        hello = Job(min_nodes=2, max_nodes=self.config.max_nodes).hello(
            0, fingerprint=None, versions=messages.Versions(PYTHON)
        )
        self.server = CoordinatorServer(self.loop, self.config, hello, "r", self.received.append, self.sock)
        self.server.start()

    def connect(self) -> FakePeer:
        self.peers.append(FakePeer(socket.create_connection(("127.0.0.1", self.config.port))))
        assert self.peers[-1].receive_soon(self.loop.step, "Welcome")
        return self.peers[-1]

    def join(self, number: int = 1, **changed) -> FakePeer:
        peer = self.connect()
        peer.send("NodeHello", make_hello(number, **changed))
        return peer

    def joined(self) -> FakePeer:
        """Let node 1 join, and the ranks start."""
        peer = self.join()
        assert peer.receive_soon(self.loop.step, "StartAttempt")
        return peer

    def take(self, kind) -> list:
        found = [each for each in self.received if isinstance(each, kind)]
        self.received[:] = []
        return found

    def is_closed_for(self, peer: FakePeer) -> bool:
        return peer.receive_soon(self.loop.step, "none of these") is None


@pytest.fixture
def make():
    worlds = []

    def begin(**changed):
        worlds.append(World(**changed))
        return worlds[-1]

    yield begin
    for world in worlds:
        if world.sock.fileno() >= 0:
            world.server.close()
        world.loop.let_expire(LINGER_S)
        for peer in world.peers:
            peer.socket.close()


@pytest.mark.parametrize(("interface", "expected"), [(None, "lo"), ("eth7", "eth7")])
def test_node_0_gets_the_address_that_the_others_reach_it_at(make, interface, expected):
    world = make(interface=interface)
    world.joined()
    (start,) = world.take(StartAttempt)
    assert (start.address, start.interface) == ("127.0.0.1", expected)
    assert [spec.host for spec in start.node_specs] == ["n0", "evil"]


def test_a_silent_node_is_lost(make):
    world = make()
    peer = world.joined()
    world.take(StartAttempt)
    world.server.on_silent_peer(1, 20.04)
    assert world.is_closed_for(peer)
    lost, note, stop = world.received
    assert (lost, type(stop)) == (NodeLost("evil"), StopAttempt)
    assert note.text == "node 1 (evil) was lost: no heartbeat for 20.0 s; stopping the others"
    assert world.server._heartbeat._last_received == {}, "it cannot be lost again"
    world.server.send_heartbeats()


def test_a_node_that_leaves_is_disconnected(make):
    world = make(max_nodes=3)
    peer = world.join(nnodes="2:3")
    assert peer.receive_soon(world.loop.step, "JoinAccepted")
    peer.send("StopRequested", signal=15)
    assert world.is_closed_for(peer)


def test_a_node_that_was_left_out_joins_again_before_its_connection_has_closed(make):
    """The end of its first connection, which may come later, is not the loss of the node."""
    world = make(max_nodes=3, join_window=0.0)
    for number in (1, 2):
        first = world.join(number, nnodes="2:3")
        assert first.receive_soon(world.loop.step, "JoinAccepted")
        world.loop.let_expire(0.0)  # the window in which more nodes may join
    first.send("NodeStartError", message="/dev/shm is full")
    assert first.receive_soon(world.loop.step, "EndJob")
    again = world.join(2, nnodes="2:3")
    assert again.receive_soon(world.loop.step, "JoinAccepted")
    first.socket.close()
    for _ in range(2):  # its end is read, then handled
        world.loop.step()
    assert sorted(world.server._peers) == [1, 2], "it is no end of the second connection"
    world.server.send_heartbeats()
    assert again.receive_soon(world.loop.step, "HeartbeatMessage")


def test_heartbeats_measure_the_clock_of_a_node(make):
    world = make()
    peer = world.joined()
    world.server.send_heartbeats()
    sent = peer.receive_soon(world.loop.step, "HeartbeatMessage")
    peer.send("HeartbeatMessage", clock=sent["clock"] + 3600, last_received=sent["clock"])
    node = world.server._machine._nodes[1]
    while node.clock_offset.error_s == float("inf"):
        world.loop.step()
    assert node.clock_offset.offset_s == pytest.approx(3600, abs=60)


def test_connections_that_are_not_of_the_job_are_counted(make):
    world = make()
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b""):
        peer = world.connect()
        peer.socket.sendall(sent)
        peer.socket.shutdown(socket.SHUT_WR)
        assert world.is_closed_for(peer)
    silent = world.connect()
    world.loop.let_expire(HELLO_TIMEOUT_S)
    assert world.is_closed_for(silent)
    peer = world.joined()
    what = "did not belong to this job: 1 spoke another protocol, 1 disconnected, 1 sent nothing"
    assert [note.text for note in world.take(NoteMessage)] == [f"3 connections to the control port {what}"]
    world.loop.let_expire(HELLO_TIMEOUT_S)
    world.server.send(messages.StopRequested(2))
    assert peer.receive_soon(world.loop.step, "StopAttempt"), "a node of the job stays"
    world.take(NoteMessage)
    for number, each in enumerate((world.server, peer)):
        report = {"attempt": 0, "stopped": 1, "clock": 1.0}
        each.send("AttemptReport", report) if number else each.send(messages.AttemptReport(0, 1, 1.0))
    assert peer.receive_soon(world.loop.step, "EndJob")
    assert world.take(NoteMessage) == [], "no others since"


def test_one_connection_that_is_not_of_the_job(make):
    world = make(token="s3cret")
    peer = world.join()
    refusal = peer.receive_soon(world.loop.step, "JoinRefused")
    assert refusal["message"] == "node 0 refuses node 1 (evil): it has no token"
    world.server.send(messages.StopRequested(2))
    what = "1 connection to the control port did not belong to this job: 1 it has no token"
    assert what in [note.text for note in world.take(NoteMessage)]


def test_the_end_is_delivered_before_the_connections_close(make):
    world = make()
    peer = world.join()
    other = world.join(node_spec=make_node_spec(1, "other"))
    assert other.receive_soon(world.loop.step, "JoinRefused")["message"].startswith("the job is running already")
    for again in (False, True, True):
        world.server.send(messages.StopRequested(2, again))
    assert peer.receive_soon(world.loop.step, "EndJob")
    world.server.close()
    assert not world.server.is_closed
    for each in (peer, other):
        assert world.is_closed_for(each)
        each.socket.close()
    while not world.server.is_closed:
        world.loop.step()
