"""Tests of a node's control link and the answers to its requests."""

from __future__ import annotations

import errno
import socket

import pytest

from ddplaunch.base.connection import Connection
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core import messages
from ddplaunch.core.net import listener
from ddplaunch.core.net.link import make_attempt_plan, make_link
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.plan.rank_layout import NodeAssignment
from tests.core.job_configs import make_job_config
from tests.features.runs.recorded_events import plan


def test_a_reply_never_arrives_within_the_call():
    loop, received = EventLoop(), []
    link = make_link(loop, plan(ranks=1), make_job_config(), received.append)

    def answered() -> list[type]:
        assert not received
        while not received:
            loop.run_once()
        kinds = [type(message) for message in received]
        received.clear()
        return kinds

    link.start()
    while not received:
        loop.run_once()
    assert received == [messages.StartAttempt(0, received[0].run_id)], "the plan of one node is complete"
    received.clear()
    link.send(messages.AttemptReport(0, 0, 0.0))
    assert answered() == [messages.AttemptEnded, messages.EndJob]
    link.close()
    assert link.is_closed


@pytest.mark.parametrize(
    ("start", "interface", "environ", "variables"),
    [
        ({"address": "10.0.0.9", "interface": "eth0"}, None, {}, {"X": "1", "GLOO_SOCKET_IFNAME": "eth0"}),
        (
            {"interface": "eth0"}, "eth7", {"GLOO_SOCKET_IFNAME": "", "X": "mine"},
            {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth7"},
        ),
        ({"interface": "eth0"}, None, {"GLOO_SOCKET_IFNAME": "mine"}, {"X": "1"}),
        ({}, None, {}, {"X": "1"}),
    ],
)  # fmt: skip
def test_the_plan_of_an_attempt(start, interface, environ, variables):
    """Variables that the user has set stay; the address is that by which the node has reached node 0."""
    config, before = make_job_config(max_nodes=2, interface=interface), plan(ranks=1)
    assigned = NodeAssignment(1, 2, 1, 2)
    order = messages.StartAttempt(0, "theirs", assigned, **start)
    made = make_attempt_plan(before, order, config, environ, {"X": "1"})
    assert (made.run_id, made.node_rank, made.world_size) == ("theirs", 1, 2)
    assert (made.master_addr, made.variables) == (start.get("address", "127.0.0.1"), variables)
    assert make_attempt_plan(before, messages.StartAttempt(0, "theirs"), config, environ, {"X": "1"}) is before
    specs = (NodeSpec(0, "n0", ("cpu",)), NodeSpec(1, "n1", ("cpu",)))
    first = messages.StartAttempt(0, "theirs", NodeAssignment(0, 2, 0, 2), node_specs=specs)
    assert [node.host for node in make_attempt_plan(before, first, config, {}, {}).nodes] == ["here", "n1"]


class Exhausted(socket.socket):
    """A socket that accepts nothing at first, as where no file descriptor is left."""

    refusals = 1

    def accept(self):
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_connections_are_accepted_again_after_a_lack_of_descriptors(monkeypatch):
    monkeypatch.setattr(listener, "ACCEPT_PAUSE_S", 0.01)
    loop, server, welcomed = EventLoop(), Exhausted(), []
    server.bind(("127.0.0.1", 0))
    server.listen()
    listening = listener.ControlPortListener(loop, server, make_job_config(), 1, lambda *peer: None)
    with socket.create_connection(server.getsockname()) as peer:
        loop.watch_fd(peer.fileno(), lambda: welcomed.append(peer.recv(1 << 10)))
        while server.refusals:
            loop.run_once()
        assert server.fileno() not in loop._selector.get_map(), "it would be readable without a pause"
        while not welcomed:
            loop.run_once()
        assert b"Welcome" in welcomed[0]
        listening.close()


def test_a_refusal_on_its_way_outlives_the_listener():
    loop, (ours, theirs) = EventLoop(), socket.socketpair()
    listening = listener.ControlPortListener(
        loop, socket.create_server(("127.0.0.1", 0)), make_job_config(), 1, lambda *peer: None
    )
    connection = Connection(loop, ours, [messages.NodeHello], on_message=print, on_lost=print)
    listening.refuse(connection, messages.JoinRefused("no", None))
    assert listening.close() == [connection]
    connection.close()
    theirs.close()
