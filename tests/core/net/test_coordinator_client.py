"""The sockets of a node's connection to node 0, which the test plays. What is decided: ``test_link_machine.py``."""

from __future__ import annotations

import errno
import os
import signal
import socket
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.core import messages
from ddplaunch.core.failures import JobResult
from ddplaunch.core.messages import CoordinatorLost, EndJob, StartAttempt, StopAttempt
from ddplaunch.core.net import coordinator_client
from ddplaunch.core.net import link_events as ev
from ddplaunch.core.net.coordinator_client import CoordinatorClient
from ddplaunch.core.net.link_machine import (
    CONNECT_TIMEOUT_S,
    DECLINE_TIMEOUT_S,
    FIRST_NOTICE_S,
    RETRY_DELAYS_S,
    LinkPhase,
)
from tests.conftest import wait_until
from tests.core.job.job_steps import Job
from tests.core.job_configs import make_job_config
from tests.core.net.fake_peer import FakePeer, ManualLoop, make_assignment

JOINED = {"run_id": "theirs", "heartbeat_timeout_s": 15.0}


class World:
    """A client of node 1, its messages, and the server to which it connects."""

    def __init__(self, monkeypatch, **changed) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.loop, self.received, self.accepted = ManualLoop(), [], []
        self.clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr("time.monotonic", lambda: self.clock.now)
        config = {"address": "127.0.0.1", "port": self.port, "join_timeout": 60.0, "min_nodes": 2, "max_nodes": 2}
        self.config = make_job_config(**{**config, **changed})
        self.hello = Job(min_nodes=2).hello(1)
        self.hello = replace(self.hello, node_spec=replace(self.hello.node_spec, devices=("cpu",)))
        self.loop.watch_fd(self.server.fileno(), lambda: self.accepted.append(FakePeer(self.server.accept()[0])))

    def start(self, **changed) -> None:
        self.client = CoordinatorClient(self.loop, self.config, replace(self.hello, **changed), self.received.append)
        self.client.start()

    def step_until(self, condition) -> None:
        wait_until(lambda: self.loop.step() or condition(), "what node 0 or the client does", 30)

    @property
    def phase(self) -> LinkPhase:
        return self.client._machine.phase

    def wait(self, seconds: float) -> None:
        """Let time pass, with the deadlines meanwhile."""
        end = self.clock.now + seconds
        while (at := self.client._machine.wake_at()) is not None and at <= end:
            self.clock.now = max(self.clock.now, at)
            self.client._post(ev.DeadlineDue())
        self.clock.now = end

    def set_timers(self) -> list[float]:
        return sorted(seconds for seconds, timer in self.loop.timers if timer.callback)

    def accept(self) -> FakePeer:
        self.step_until(lambda: self.accepted)
        return self.accepted.pop()

    def greet(self, **changed) -> FakePeer:
        """Accept the client's connection, and send the first message of node 0."""
        peer = self.accept()
        peer.send("Welcome", {"ddplaunch": messages.PROTOCOL_VERSION, "nonce": "n", **changed})
        return peer

    def receive(self, peer: FakePeer, op: str) -> dict:
        return peer.receive_soon(self.loop.step, op)

    def meet(self, **joined) -> FakePeer:
        peer = self.greet()
        self.hello_sent = self.receive(peer, "NodeHello")
        before = len(self.received)
        peer.send("JoinAccepted", {**JOINED, **joined})
        self.step_until(lambda: len(self.received) > before)
        return peer

    def take(self) -> list[messages.Message]:
        received, self.received[:] = [*self.received], []
        return received

    def outcome(self) -> JobResult:
        self.step_until(lambda: isinstance((self.received or [None])[-1], EndJob))
        *_, lost, end = self.take()
        assert isinstance(lost, CoordinatorLost)
        assert isinstance(end, EndJob)
        return end.outcome


@pytest.fixture
def make(monkeypatch):
    worlds = []

    def begin(**changed):
        worlds.append(World(monkeypatch, **changed))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.client.close()
        assert 15.0 not in world.set_timers(), "no heartbeat is waited for"
        world.server.close()
        for peer in world.accepted:
            peer.socket.close()


def test_another_version_of_node_0_is_refused(make):
    world = make()
    world.start()
    peer = world.greet(ddplaunch=5)
    what = f"node 0 runs another version of ddplaunch: it speaks protocol 5, this one {messages.PROTOCOL_VERSION}"
    assert world.outcome().usage_error == (what, "install the same version on every node")
    world.client.close()
    assert peer.ended(), "without a hello"


@pytest.mark.parametrize("proof", [None, "0" * 64])
def test_node_0_must_know_the_token(make, proof):
    world = make(token="s3cret")
    world.start()
    peer = world.greet()
    assert world.receive(peer, "NodeHello")["proof"]
    peer.send("JoinAccepted", {**JOINED, "proof": proof})
    what = f"node 0 at 127.0.0.1:{world.port} does not know the token"
    assert world.outcome().usage_error == (what, "give every node the same --token")


def test_a_refusal_ends_the_node(make):
    world = make()
    world.start()
    world.greet().send("JoinRefused", {"message": "no room", "hint": "leave it out"})
    assert world.outcome() == JobResult(2, usage_error=("no room", "leave it out"))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not answer as node 0: another program listens there, or node 0 is"),
        (b"", "accepts the connection and closes it"),
    ],
)
def test_a_port_of_another_program_is_tried_again(make, sent, why):
    world = make()
    world.start()
    for _ in range(2):
        peer = world.accept()
        peer.socket.sendall(sent)
        peer.socket.close()
        world.step_until(lambda: world.phase is LinkPhase.PAUSING)
        world.wait(RETRY_DELAYS_S[1])
    world.wait(FIRST_NOTICE_S)
    assert world.take()[0].reason.startswith(f"127.0.0.1:{world.port} {why}")


class UnreachableSocket(socket.socket):
    def connect(self, address):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")


class SilentSocket(socket.socket):
    """A socket whose peer does not answer."""

    def connect(self, address):
        raise BlockingIOError


@pytest.mark.parametrize(
    ("kind", "phase", "why"),
    [
        (UnreachableSocket, LinkPhase.PAUSING, ": network is unreachable"),
        (SilentSocket, LinkPhase.CONNECTING, " does not answer: does a firewall block it?"),
    ],
)
def test_why_node_0_is_not_reached(make, monkeypatch, kind, phase, why):
    world = make()
    monkeypatch.setattr(coordinator_client.socket, "socket", kind)
    world.start()
    world.step_until(lambda: world.phase is phase)
    world.wait(CONNECT_TIMEOUT_S)
    assert world.take()[-1].reason == f"127.0.0.1:{world.port}{why}"
    for fd in world.loop._selector.get_map():
        os.fstat(fd)  # none of them is closed


def test_a_node_connects_from_its_interface(make, monkeypatch):
    monkeypatch.setattr(coordinator_client.addresses, "find_address", lambda interface, family: "127.0.0.5")
    world = make(interface="eth7")
    world.start()
    assert world.accept().socket.getpeername()[0] == "127.0.0.5"


def test_localhost_is_said_to_be_this_machine(make):
    """It is typed on node 1 by users who mean node 0."""
    world = make(address="localhost")
    world.loop.unwatch_fd(world.server.fileno())
    world.server.close()
    world.start()
    wanted = f"localhost:{world.port}: connection refused (localhost is this machine)"
    world.step_until(lambda: world.client._machine._problem == wanted)


def test_a_connection_of_a_socket_to_itself_is_none(make):
    """The kernel may choose the port of node 0 for the client, if no program listens there (TCP simultaneous open)."""
    world = make()
    world.loop.unwatch_fd(world.server.fileno())
    world.server.close()
    world.start()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", world.port))
    sock.connect(("127.0.0.1", world.port))
    world.client._post(ev.Resolved(((socket.AF_INET, ("127.0.0.1", world.port)),)))
    ((number, other),) = world.client._connecting.items()
    world.loop.unwatch_fd(other.fileno())
    other.close()
    world.client._connecting[number] = sock
    world.client._on_connected(number)
    assert world.client._connection is None
    world.wait(60.0)
    assert f"127.0.0.1:{world.port}: connection refused" in world.take()[-1].outcome.remark


@pytest.mark.parametrize("has_node_rank", [True, False])
def test_node_0_that_is_not_reached_ends_the_node(make, has_node_rank):
    world = make()
    world.start(has_node_rank=has_node_rank)
    world.wait(60.0)
    what = f"node 0 was not reached in 60 s (--join-timeout): 127.0.0.1:{world.port} has not answered yet"
    rank = " with --node-rank 0" if has_node_rank else ""
    hint = f"is the same command running there{rank}, and is the port open from here?"
    assert world.outcome() == JobResult(69, remark=f"{what}\n  {hint}")


def test_a_node_that_cannot_start_reports_that_if_it_reaches_node_0(make):
    error = messages.NodeStartError("no log", "another folder")
    for reached in (True, False):
        world = make()
        world.start()
        world.client.send(error)
        assert world.take() == []
        if reached:
            peer = world.greet()
            peer.send("JoinAccepted", JOINED)
            assert world.receive(peer, "NodeHello")
            assert world.receive(peer, "NodeStartError") == {"message": "no log", "hint": "another folder"}
        world.wait(DECLINE_TIMEOUT_S)
        assert world.outcome().usage_error == ("no log", "another folder")


def test_a_node_that_is_stopped_before_the_welcome_does_not_join(make):
    world = make()
    world.start()
    peer = world.accept()
    world.step_until(lambda: world.client._connection)
    world.client.send(messages.StopRequested(signal.SIGINT))
    peer.send("Welcome", ddplaunch=messages.PROTOCOL_VERSION, nonce="n")
    peer.socket.shutdown(socket.SHUT_WR)
    world.step_until(lambda: world.client.is_closed)
    assert peer.receive("NodeHello") is None, "node 0 counts a node that has sent one as joined"
    assert world.outcome() == JobResult(130)


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (messages.StopRequested(signal.SIGINT), JobResult(130)),
        (
            messages.PreemptionNotice(signal.SIGUSR2),
            JobResult(75, remark="preempted by SIGUSR2: no rank was running"),
        ),
        (messages.ForwardSignal(signal.SIGUSR1), None),
    ],
)
def test_a_signal_before_node_0_is_reached(make, message, outcome):
    world = make()
    world.start()
    world.client.send(message)
    if outcome:
        assert world.outcome() == outcome
        world.client.send(message)
        world.wait(60.0)
    assert world.take() == []


def test_node_0_that_is_lost_before_the_start_is_connected_to_again(make):
    """With the node rank that it has given, and for the whole --join-timeout."""
    world = make()
    world.start(has_node_rank=False)
    peer = world.meet(node_rank=1)
    world.wait(60.0)
    (accepted,) = world.take()
    assert accepted.node_rank == 1
    assert world.set_timers()[-2:] == [3.75, 15.0], "the heartbeat's interval and timeout"
    world.client.send_heartbeats()
    assert world.receive(peer, "HeartbeatMessage"), "the connection stays"
    world.clock.now += 3
    peer.send("HeartbeatMessage", clock=1e9)
    moments = world.client._heartbeat._last_received
    world.step_until(lambda before=moments[0]: moments[0] > before)
    world.clock.now += 7
    peer.socket.shutdown(socket.SHUT_WR)
    world.step_until(lambda: world.received)
    (notice,) = world.take()
    assert not {3.75, 15.0} & {*world.set_timers()}, "no heartbeat is waited for"
    assert notice.reason == f"node 0 at 127.0.0.1:{world.port} was lost: its connection closed"
    world.wait(RETRY_DELAYS_S[0])
    world.meet(node_rank=1)
    assert world.hello_sent["node_spec"]["node_rank"] == 1
    assert not world.hello_sent["has_node_rank"]
    world.wait(60.0)
    assert len(world.take()) == 1


@pytest.mark.parametrize("is_silent", [False, True])
def test_ranks_are_stopped_when_node_0_is_lost(make, is_silent):
    for was_stopped in (False, True):
        world = make(grace=7.0)
        world.start()
        peer = world.meet()
        peer.send("StartAttempt", attempt=0, run_id="theirs", assignment=make_assignment(1))
        world.step_until(lambda w=world: isinstance(w.received[-1], StartAttempt))
        start = world.take()[-1]
        assert (start.address, start.interface) == ("127.0.0.1", "lo")
        if is_silent:
            world.client.on_silent_peer(0, 15.04)
            assert peer.ended()
        else:
            peer.socket.shutdown(socket.SHUT_WR)
        world.step_until(lambda w=world: isinstance((w.received or [None])[-1], StopAttempt))
        lost, note, stop = world.take()
        why = f"node 0 (127.0.0.1) was lost: {'no heartbeat for 15.0 s' if is_silent else 'its connection closed'}"
        assert (type(lost), note.text, stop) == (
            CoordinatorLost, f"{why}; stopping the ranks here", StopAttempt(0, signal.SIGTERM, 7.0),
        )  # fmt: skip
        if was_stopped:
            world.client.send(messages.StopRequested(signal.SIGTERM))
        world.client.send(messages.AttemptReport(1, 0, 1.0))
        assert world.take() == [], "of another attempt"
        world.client.send(messages.AttemptReport(0, 1, 1.0))
        assert world.outcome() == (JobResult(143) if was_stopped else JobResult(69, remark=why))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (
            {"op": "JoinStatus", "joined": 1, "min_nodes": 2, "max_nodes": 2, "missing": [1]},
            "a JoinStatus after the start",
        ),
        ({"op": "StartAttempt", "attempt": 0, "run_id": "r", "assignment": make_assignment(1)}, "a start out of turn"),
    ],
)
def test_node_0_that_is_lost_between_attempts_ends_the_node(make, sent, why):
    world = make()
    world.start()
    peer = world.meet()
    peer.send("StartAttempt", attempt=0, run_id="theirs", assignment=make_assignment(1))
    world.step_until(lambda: isinstance(world.received[-1], StartAttempt))
    world.client.send(messages.AttemptReport(0, 0, 1.0))
    world.take()
    peer.send(**sent)
    assert world.outcome() == JobResult(69, remark=f"node 0 (127.0.0.1) was lost: it sent {why}")
