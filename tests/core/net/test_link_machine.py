"""Histories of a node's connection to node 0, without sockets: what happens, when, and what the machine decides."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from random import Random
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core import messages
from ddplaunch.core.failures import JobResult
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Command, MachineEvent
from ddplaunch.core.messages import PROTOCOL_VERSION, JoinDeclined
from ddplaunch.core.net import link_commands as do
from ddplaunch.core.net import link_events as ev
from ddplaunch.core.net import token_auth
from ddplaunch.core.net.link_machine import LINK_TRANSITIONS, LinkMachine, LinkPhase
from ddplaunch.system.plan.rank_layout import NodeAssignment
from tests.core.job.job_world import make_config, make_hello
from tests.core.machine_histories import MachineWorld, Step, describe_by, step


class World(MachineWorld):
    """Node 1 of two, which has one rank. ``now`` is the monotonic clock."""

    def __init__(self, *, has_node_rank: bool = True, declines: bool = False, **settings: Any) -> None:
        usual = {"address": "n0", "port": 5, "join_timeout": 60.0, "min_nodes": 2, "max_nodes": 2}
        config: JobConfig = make_config(**{**usual, **settings})
        hello = make_hello(config, 1, has_node_rank=has_node_rank)
        hello = replace(hello, node_spec=replace(hello.node_spec, devices=("cpu",)))
        self.machine = LinkMachine(config, JoinDeclined(1, "n1", "no torch", None, None) if declines else hello)

    def describe_all(self, commands: Sequence[Command]) -> list[str]:
        return describe_by(describe, commands)


def describe(command: Command) -> str | None:
    """Describe a command in a few words; None for those of sockets that only serve another one."""
    match command:
        case do.Connect(address=(_, (host, _))):
            return f"connect to {host}"
        case do.Send(message=message):
            return f"send {type(message).__name__}"
        case do.Deliver(message=messages.ConnectingToNodeZero(reason=reason)):
            return f"wait: {reason}"
        case do.Deliver(message=messages.NoteMessage(text=text)):
            return f"note: {text}"
        case do.Deliver(message=messages.EndJob(outcome=outcome)):
            return f"end {_describe_result(outcome)}"
        case do.Deliver(message=message):
            return f"deliver {type(message).__name__}"
        case do.Resolve() | do.BeginHeartbeats():
            return type(command).__name__
    return None


def _describe_result(result: JobResult) -> str:
    text = result.usage_error[0] if result.usage_error else result.remark
    return f"{result.code}: {text}" if text else str(result.code)


def replay(history: Iterable[Step], world: World | None = None) -> World:
    """Replay a history; assert the commands of each step."""
    world = world or World()
    world.replay(history)
    return world


# ------------------------------------------------------------------------------------------------- events, in few words


def resolved(*hosts: str, error: int | None = None) -> ev.Resolved:
    return ev.Resolved(tuple((socket.AF_INET, (host, 5)) for host in hosts), error)


def failed(number: int, code: int | None = errno.ECONNREFUSED, *, at_once: bool = False) -> ev.ConnectFailed:
    return ev.ConnectFailed(number, code, at_once)


def connected(number: int = 1) -> ev.Connected:
    return ev.Connected(number, "nonce")


def got(message: messages.Message) -> ev.MessageReceived:
    return ev.MessageReceived(0, message)


def posts(message: messages.Message) -> ev.MessagePosted:
    return ev.MessagePosted(message)


def welcome(version: int = PROTOCOL_VERSION) -> ev.MessageReceived:
    return got(messages.Welcome(version, "n"))


def accepted(**fields: Any) -> ev.MessageReceived:
    return got(messages.JoinAccepted("theirs", 15.0, **fields))


def starts(attempt: int = 0) -> ev.MessageReceived:
    return got(messages.StartAttempt(attempt, "theirs", NodeAssignment(1, 2, 1, 2)))


def stop_request(number: int) -> ev.MessagePosted:
    return posts(messages.StopRequested(number))


def report(attempt: int = 0) -> ev.MessagePosted:
    return posts(messages.AttemptReport(attempt, 0, 1e9))


CLOSED = ev.ConnectionLost("its connection closed")
SILENT = ev.ConnectionLost("no heartbeat for 15.0 s")
LOST = "deliver CoordinatorLost"
START_ERROR = messages.NodeStartError("no log", "another folder")
UP = (step(0, ev.Start(), "Resolve"), step(0, resolved("a"), "connect to a"))
GREETED = (*UP, step(0, connected()), step(0, welcome(), "send NodeHello"))
JOINED = (*GREETED, step(0.1, accepted(), "BeginHeartbeats", "deliver JoinAccepted"))
RUNNING = (*JOINED, step(5, starts(), "deliver StartAttempt"))
OTHER = "n0:5 does not answer as node 0: another program listens there, or node 0 is overloaded"

HISTORIES: dict[str, tuple[Step, ...]] = {
    "a node joins, and runs until node 0 ends the job": (
        *RUNNING,
        step(9, posts(messages.RanksFinished(0)), "send RanksFinished"),
        step(9, report(), "send AttemptReport"),
        step(10, got(messages.EndJob(JobResult(0))), "end 0"),
        step(11, CLOSED),
    ),
    "a name that does not resolve yet, and a name server that does not answer": (
        step(0, ev.Start(), "Resolve"),
        step(0, resolved(error=socket.EAI_NONAME)),
        step(0.1, None, "Resolve"),
        step(0.2, resolved(error=socket.EAI_AGAIN)),
        step(0.3, None, "wait: the name server does not answer for n0"),
        step(0.4, None, "Resolve"),
        step(0.4, resolved(error=socket.EAI_NONAME), "wait: n0 does not resolve yet"),
    ),
    "the next attempt to connect begins later and later": (
        *UP,
        step(0, failed(1)),
        step(0.1, None, "Resolve"),
        step(0.1, resolved("a"), "connect to a"),
        step(0.1, failed(2)),
        step(0.31, None, "wait: n0:5: connection refused", "Resolve"),
        step(1, resolved("a"), "connect to a"),
        step(1, failed(3), "wait: n0:5: connection refused"),
        step(1.39, None),
        step(1.4, None, "Resolve"),
        step(2, resolved("a"), "connect to a"),
        step(2, failed(4), "wait: n0:5: connection refused"),
        step(2.7, None, "Resolve"),
        step(3, resolved("a"), "connect to a"),
        step(3, failed(5), "wait: n0:5: connection refused"),
        step(4, None, "Resolve"),
        step(5, resolved("a"), "connect to a"),
        step(5, failed(6), "wait: n0:5: connection refused"),
        step(5.99, None),
        step(6, None, "Resolve"),
    ),
    "the next address is tried soon in parallel, or at once where one fails": (
        step(0, ev.Start(), "Resolve"),
        step(0, resolved("refused", "a", "b", "c"), "connect to refused"),
        step(0, failed(1, errno.ENETUNREACH, at_once=True), "connect to a"),
        step(0.24, None),
        step(0.25, None, "connect to b"),
        step(0.31, failed(3), "wait: n0:5: network is unreachable"),
        step(0.5, None),
        step(0.5, failed(2), "connect to c"),
        step(0.6, connected(4)),
    ),
    "no address has a socket of its kind": (
        step(0, ev.Start(), "Resolve"),
        step(0, resolved("a"), "connect to a"),
        step(0.3, failed(1, None, at_once=True), "wait: n0:5 has not answered yet"),
        step(0.5, None, "Resolve"),
    ),
    "node 0 is silent": (
        *UP,
        step(3.9, None, "wait: n0:5 has not answered yet"),
        step(4, None, "wait: n0:5 does not answer: does a firewall block it?"),
        step(4.1, None, "Resolve"),
    ),
    "another program listens on the port": (
        *UP,
        step(1, connected(), "wait: n0:5 has not answered yet"),
        step(1.1, ev.ConnectionLost("it speaks another protocol"), f"wait: {OTHER}"),
        step(1.25, None, "Resolve"),
        step(1.25, resolved("a"), "connect to a"),
        step(1.3, connected(2)),
        step(1.4, CLOSED, "wait: n0:5 accepts the connection and closes it"),
    ),
    "another program listens on the port, and says nothing": (
        *UP,
        step(1, connected(), "wait: n0:5 has not answered yet"),
        step(5.9, None),
        step(6, None, f"wait: {OTHER}"),
    ),
    "node 0 does not reply to the hello": (
        *GREETED,
        step(4.9, None, "wait: n0:5 has not answered yet"),
        step(5, None, "wait: node 0 at n0:5 did not complete the handshake"),
    ),
    "node 0 is not reached in time": (
        *UP,
        step(0.1, posts(messages.ForwardSignal(SIGUSR1))),
        step(0.2, failed(1)),
        step(0.25, None),
        step(
            60,
            None,
            "wait: n0:5: connection refused",
            "Resolve",
            LOST,
            "end 69: node 0 was not reached in 60 s (--join-timeout): n0:5: connection refused\n"
            "  is the same command running there with --node-rank 0, and is the port open from here?",
        ),
        step(61, resolved("a")),
    ),
    "node 0 runs another version": (
        *UP,
        step(0, connected()),
        step(
            0,
            welcome(5),
            LOST,
            f"end 2: node 0 runs another version of ddplaunch: it speaks protocol 5, this one {PROTOCOL_VERSION}",
        ),
    ),
    "node 0 refuses the node": (
        *GREETED,
        step(0, got(messages.JoinRefused("no room", "leave it out")), LOST, "end 2: no room"),
    ),
    "a stop before the hello ends the node, which node 0 does not know": (
        *UP,
        step(0, connected()),
        step(0.1, stop_request(SIGINT), LOST, "end 130"),
        step(0.2, welcome()),
    ),
    "a stop after the hello: node 0 gets the reason": (
        *GREETED,
        step(0.1, stop_request(SIGTERM), "send StopRequested", LOST, "end 143"),
    ),
    "a preemption notice before node 0 is reached": (
        *UP,
        step(0.1, posts(messages.PreemptionNotice(SIGUSR2)), LOST, "end 75: preempted by SIGUSR2: no rank was running"),
        step(0.2, stop_request(SIGINT)),
    ),
    "a node that cannot start its ranks reports that if it reaches node 0": (
        *UP,
        step(0.1, posts(START_ERROR)),
        step(0.2, connected()),
        step(0.2, welcome(), "send NodeHello"),
        step(0.2, accepted(), "BeginHeartbeats", "send NodeStartError"),
        step(3.1, None, LOST, "end 2: no log"),
    ),
    "a node that cannot start its ranks does not wait for node 0 for long": (
        *UP,
        step(0.1, posts(START_ERROR)),
        step(3, None, "wait: n0:5 has not answered yet"),
        step(3.1, None, LOST, "end 2: no log"),
    ),
    "node 0 is lost before the first attempt: the node connects again, for the whole --join-timeout": (
        *JOINED,
        step(50, CLOSED, "wait: node 0 at n0:5 was lost: its connection closed"),
        step(50.1, None, "Resolve"),
        step(100, resolved("a"), "connect to a"),
        step(100, connected(2)),
        step(100, welcome(), "send NodeHello"),
        step(100, accepted(), "BeginHeartbeats", "deliver JoinAccepted"),
        step(200, starts(), "deliver StartAttempt"),
    ),
    "node 0 is lost while ranks run: they are stopped, and their report ends the node": (
        *RUNNING,
        step(
            9,
            SILENT,
            LOST,
            "note: node 0 (n0) was lost: no heartbeat for 15.0 s; stopping the ranks here",
            "deliver StopAttempt",
        ),
        step(10, report(1)),
        step(11, report(), LOST, "end 69: node 0 (n0) was lost: no heartbeat for 15.0 s"),
    ),
    "node 0 is lost while ranks run that are being stopped": (
        *RUNNING,
        step(8, stop_request(SIGTERM), "send StopRequested"),
        step(
            9,
            CLOSED,
            LOST,
            "note: node 0 (n0) was lost: its connection closed; stopping the ranks here",
            "deliver StopAttempt",
        ),
        step(11, report(), LOST, "end 143"),
    ),
    "node 0 is lost between attempts": (
        *RUNNING,
        step(8, report(), "send AttemptReport"),
        step(9, CLOSED, LOST, "end 69: node 0 (n0) was lost: its connection closed"),
    ),
    "how an attempt has ended is decided by node 0": (
        *RUNNING,
        step(8, stop_request(SIGTERM), "send StopRequested"),
        step(8, report(), "send AttemptReport"),
        step(8.1, posts(messages.ForwardSignal(SIGUSR1)), "send ForwardSignal"),
        step(9, got(messages.EndJob(JobResult(3))), "end 3"),
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
def test_history(history: tuple[Step, ...]) -> None:
    replay(history)


@pytest.mark.parametrize("knows", [True, False])
def test_node_0_must_know_the_token(knows: bool) -> None:
    world = World(token="s3cret")
    replay(UP, world)
    world.on(connected())
    (hello,) = [each.message for each in world.on(welcome()) if isinstance(each, do.Send)]
    assert isinstance(hello, messages.NodeHello)
    nonces = ("n", "nonce")
    assert hello.proof == token_auth.compute_proof("s3cret", token_auth.ROLE_MEMBER, nonces)
    proof = token_auth.compute_proof("s3cret" if knows else "other", token_auth.ROLE_NODE_ZERO, nonces)
    expected = ("BeginHeartbeats", "deliver JoinAccepted")
    wrong = (LOST, "end 2: node 0 at n0:5 does not know the token")
    replay((step(0, accepted(proof=proof), *(expected if knows else wrong)),), world)


def test_a_node_that_is_given_its_node_rank_prefers_it_later() -> None:
    world = replay(GREETED, World(has_node_rank=False))
    replay((step(0.1, accepted(node_rank=1), "BeginHeartbeats", "deliver JoinAccepted"),), world)
    lost = "wait: node 0 at n0:5 was lost: its connection closed"
    replay((step(0.2, CLOSED), step(0.31, None, lost, "Resolve")), world)
    replay((step(0.31, resolved("a"), "connect to a"), step(0.31, connected(2))), world)
    (hello,) = [each.message for each in world.on(welcome()) if isinstance(each, do.Send)]
    assert isinstance(hello, messages.NodeHello)
    assert (hello.node_spec.node_rank, hello.has_node_rank) == (1, False)


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (GREETED, accepted(node_rank=1)),  # it has one
        (RUNNING, got(messages.JoinStatus(1, 2, 2, (1,)))),
        (RUNNING, starts(1)),
        (JOINED, got(messages.StartAttempt(0, "theirs"))),
        (JOINED, got(messages.StartAttempt(0, "theirs", NodeAssignment(0, 2, 0, 2)))),
        (JOINED, got(messages.StartAttempt(0, "theirs", NodeAssignment(1, 2, 2, 2)))),
    ],
)
def test_what_node_0_cannot_send(before: tuple[Step, ...], event: MachineEvent) -> None:
    world = replay(before)
    phase = world.machine.phase
    with pytest.raises(ProtocolError):
        world.on(event)
    assert world.machine.phase is phase


def test_a_node_that_declines_cannot_be_accepted() -> None:
    world = World(declines=True)
    replay((*UP, step(0, connected()), step(0, welcome(), "send JoinDeclined")), world)
    with pytest.raises(ProtocolError):
        world.on(accepted())


def test_random_histories_end_and_take_no_invalid_step() -> None:
    """Whatever comes in whatever order, also after the end."""
    reached = set[LinkPhase]()
    for seed in range(500):
        random, world = Random(seed), World(declines=seed % 20 == 0)
        done = world.on(ev.Start())
        ends = 0
        for _ in range(random.randrange(150)):
            numbers = world.machine._connecting or [99]
            event = random.choice(
                (resolved("a", "b"), resolved(error=socket.EAI_NONAME), failed(random.choice(numbers)), CLOSED,
                 failed(random.choice(numbers), None, at_once=True), connected(random.choice(numbers)), accepted(),
                 welcome(), starts(random.randrange(3)), starts(random.randrange(3)), report(random.randrange(3)),
                 random.choice((None, stop_request(SIGTERM), posts(START_ERROR), got(messages.EndJob(JobResult(0))))),
                 None, None)
            )  # fmt: skip
            if isinstance(event, ev.MessageReceived) and not _may_come(world.machine.phase, event):
                continue
            if event is CLOSED and world.machine.phase in SOCKETLESS:
                continue
            if event is None:
                done = world.wait_until(world.now + random.choice((*[0.1] * 30, 5.0, 70.0)))
            else:
                try:
                    done = world.on(event)
                except ProtocolError:
                    done = world.on(ev.ConnectionLost("it sent what it cannot send"))
            ends += sum(isinstance(each, do.Deliver) and isinstance(each.message, messages.EndJob) for each in done)
            reached.add(world.machine.phase)
        world.on(ev.Closed())
        assert world.machine.phase is LinkPhase.OVER, seed
        assert world.machine.wake_at() is None
        assert ends <= 1, seed
    assert reached == set(LINK_TRANSITIONS)


SOCKETLESS = (LinkPhase.PAUSING, LinkPhase.RESOLVING, LinkPhase.CONNECTING)
_EXPECTED = {LinkPhase.GREETING: messages.Welcome, LinkPhase.ASKING: messages.JoinAccepted}


def _may_come(phase: LinkPhase, event: ev.MessageReceived) -> bool:
    """Whether the connection accepts a message of this type now."""
    if phase in SOCKETLESS:
        return False
    if phase in _EXPECTED:
        return isinstance(event.message, _EXPECTED[phase])
    return not isinstance(event.message, messages.Welcome | messages.JoinAccepted)
