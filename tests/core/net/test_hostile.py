"""Tests of well-formed messages with impossible content, from a node or from a false node 0."""

from __future__ import annotations

import json
import re
import signal

import pytest

from ddplaunch.base.errors import escape_control_chars
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import decode
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.messages import FromNode, FromNodeZero, NoteMessage
from tests.conftest import wait_until, write_program
from tests.core.job.job_steps import joined
from tests.core.job.test_joining import Nodes
from tests.core.net.fake_peer import (
    HOST,
    FakeNodeZero,
    join_as_node_1,
    make_arrivals,
    make_assignment,
    make_failure,
    make_node_spec,
)

WAITS = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def nodes(start_ddplaunch, tmp_path):
    write_program(tmp_path, "waits.py", WAITS)
    return lambda *options: Nodes(start_ddplaunch, tmp_path, 2, "--grace", "1", *options)


@pytest.fixture
def started(nodes):
    """A launcher of node 0 whose rank runs, and what plays node 1 for it, with these changes to its hello."""

    def begin(*options, **changed):
        job = nodes(*options)
        launcher, peer = job.start(0, target="waits.py"), join_as_node_1(job, **changed)
        assert peer.receive("StartAttempt")
        launcher.wait_for("up")
        return launcher, peer

    return begin


@pytest.fixture
def node_zero(nodes):
    """A launcher of node 1, and what plays node 0 for it."""
    played = []

    def begin(*options):
        job = nodes(*options)
        played.append(FakeNodeZero(job))
        return played[-1], job.start(1, target="waits.py")

    yield begin
    for each in played:
        each.close()


def assert_clean(text: str) -> None:
    assert "Traceback" not in text
    assert escape_control_chars(text) == text


def decode_message(op: str, body: dict, accepted) -> object:
    """Decode a message as on arrival."""
    return decode(json.dumps({"op": op, **body}).encode(), accepted)


def test_a_node_that_sends_impossible_values_is_lost(started):
    launcher, peer = started()
    peer.send("FailureReported", attempt=0, clock=1e9, failure=make_failure(exit_code=256))
    assert peer.ended()
    assert launcher.wait(20) == 69
    assert "node 1 (evil) was lost: it sent " in launcher.stderr()
    assert_clean(launcher.stderr())
    launcher.assert_nothing_left()


INVALID, NOT_OWN = "a message that is not expected here", "that (is|are) not its own"
OF_NODE_1 = {"rank": 2, "host": "n1"}
"""A rank of node 1 in the job of test_machine, so that only what a row changes is wrong."""


@pytest.mark.parametrize(
    ("op", "body", "error"),
    [
        ("StopRequested", {"signal": 40}, INVALID),
        ("StopRequested", {"signal": 19}, INVALID),
        ("FailureReported", {"failure": make_failure(0, host="n1")}, NOT_OWN),
        ("FailureReported", {"failure": make_failure(**OF_NODE_1, exit_code=0)}, INVALID),
        ("FailureReported", {"failure": make_failure(**OF_NODE_1, exit_code=None)}, INVALID),
        ("FailureReported", {"failure": make_failure(**OF_NODE_1, signal=9)}, INVALID),
        ("FailureReported", {"failure": make_failure(2, host=HOST)}, "another attempt or host"),
        ("FailureReported", {"failure": make_failure(**OF_NODE_1, attempt=1)}, "another attempt or host"),
        ("FailureReported", {"failure": make_failure(**OF_NODE_1, moment=1e308)}, INVALID),
        ("FailureReported", {"failure": make_failure(**OF_NODE_1)}, "again"),
        ("AttemptReport", {"stopped": 0, "tails": [[3, ["of a rank that has not failed"]]]}, "last lines"),
        ("AttemptReport", {"stopped": 3}, "more stopped ranks"),
        ("ArrivalsReported", {"arrivals": [make_arrivals(2, gaps=[1 << 60])]}, INVALID),
        ("ArrivalsReported", {"arrivals": [make_arrivals(2, number=-1)]}, INVALID),
        ("ArrivalsReported", {"arrivals": [make_arrivals(0)]}, NOT_OWN),
        ("HeartbeatMessage", {"last_received": -1.0}, INVALID),
        ("HeartbeatMessage", {"held_s": 1e9}, INVALID),
    ],
)
def test_an_impossible_message_of_a_node_is_a_protocol_error(op, body, error):
    """It is refused on arrival, or when compared with the state of the job, in which a rank of the node has failed."""
    job, accepted = joined(1), load_features().message_types(FromNode)

    def send(op, **body):
        job.send(
            1, decode_message(op, body if op == "StopRequested" else {"attempt": 0, "clock": 1e9, **body}, accepted)
        )

    send("FailureReported", failure=make_failure(**OF_NODE_1))
    with pytest.raises(ProtocolError, match=error):
        send(op, **body)


def test_a_preemption_notice_by_a_signal_without_a_name():
    job = joined(1)
    job.send(1, decode_message("PreemptionNotice", {"signal": 40}, load_features().message_types(FromNode)))
    (note,) = job.take(NoteMessage, 0)
    assert note.text.startswith("preempted by signal 40 on node 1 (n1): ranks have")


@pytest.mark.ci
def test_long_texts_of_a_node_are_cut(started):
    """Each of its ranks may fail once in an attempt, and texts are cut on arrival."""
    launcher, peer = started(node_spec=make_node_spec(1, ranks=25))
    for rank in range(1, 26):
        text = "x" * (4 << 20)
        peer.send(
            "FailureReported", attempt=0, failure=make_failure(rank, message=f"E: {rank}", traceback=text), clock=1e9
        )
    peer.send("StopRequested", signal=2)
    wait_until(lambda: "Ctrl-C on node 1" in launcher.stderr(), "the last message to be read")
    import psutil

    assert psutil.Process(launcher.process.pid).memory_info().rss < 90 << 20
    peer.reset()
    assert launcher.wait(20) == 130


def test_a_node_with_heartbeats_that_never_ends_is_waited_for_until_ctrl_c(started):
    launcher, peer = started("--grace", "60")
    for times in (1, 2):
        launcher.signal(signal.SIGINT)
        order = peer.receive("StopAttempt")
        assert order
        assert order["grace_s"] == (60 if times == 1 else 0)
        peer.send("HeartbeatMessage", clock=1e9)
    launcher.signal(signal.SIGINT)
    assert launcher.wait(10) == 130
    assert peer.receive("EndJob")
    launcher.assert_nothing_left()


EVIL = "\x1b[2J\x1b]0;mine\x07\r\u202e\x85ddplaunch: all is well\nddplaunch: rank 0 failed\u2028x\0"


def test_what_is_printed_of_a_rank_elsewhere_is_harmless(started):
    launcher, peer = started()
    evil_failure = make_failure(message=f"E{EVIL}", traceback=f"T{EVIL}", hint=f"H{EVIL}")
    peer.send("FailureReported", attempt=0, failure=evil_failure, clock=1e9)
    assert peer.receive("StopAttempt")
    peer.send("AttemptReport", attempt=0, stopped=0, clock=1e9, tails=[[1, [EVIL]]])
    assert launcher.wait(20) == 3
    shown = launcher.stderr()
    assert_clean(shown)
    assert "rank 1 failed with E\\x1b[2J\\x1b]0;mine\\x07\\r\\u202e\\x85ddplaunch: all is well (exit code 3)" in shown
    ours = re.findall("^ddplaunch: (.*)", shown, re.MULTILINE)
    assert not [line for line in ours if line.startswith(("all is well", "rank 0"))]


def test_a_run_id_stays_inside_the_log_folder(node_zero, tmp_path):
    false, launcher = node_zero("--log-dir", "logs")
    for run_id in ("../../outside", "a/b", "..", "nul\0", "e\x1bsc"):
        assert false.meet(run_id=run_id).ended()
    launcher.signal(signal.SIGINT)
    assert launcher.wait(20) == 130
    assert_clean(launcher.stderr())
    assert not (tmp_path / "outside").exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("node-")]


def test_impossible_values_of_node_0_before_the_start(node_zero):
    false, launcher = node_zero()
    for changed in ({"heartbeat_timeout_s": 1e308}, {"heartbeat_timeout_s": 0.01}, {"node_rank": 1}):
        assert false.meet(**changed).ended()
    wait_until(lambda: "does not answer as node 0: another program listens there" in launcher.stderr(), "the account")
    for order in (
        {},
        {"assignment": make_assignment(0)},
        {"assignment": make_assignment(2)},
        {"assignment": make_assignment(1, nnodes=9)},
        {"assignment": make_assignment(1, world_size=1)},
        {"assignment": make_assignment(1), "node_specs": [make_node_spec(0), make_node_spec(1)]},
    ):
        peer = false.meet()
        peer.send("StartAttempt", attempt=0, run_id="theirs", **order)
        assert peer.ended(), "a start without us"
    launcher.signal(signal.SIGTERM)
    assert launcher.wait(20) == 143
    assert_clean(launcher.stderr())


def test_node_0_with_impossible_messages_is_lost(node_zero):
    false, launcher = node_zero()
    peer = false.meet()
    peer.send("StartAttempt", attempt=0, run_id="theirs", assignment=make_assignment(1))
    launcher.wait_for("up")
    peer.send("StartAttempt", attempt=1, run_id="theirs", assignment=make_assignment(1))
    assert peer.ended()
    assert launcher.wait(20) == 69
    assert "node 0 (127.0.0.1) was lost: it sent " in launcher.stderr()
    assert_clean(launcher.stderr())
    launcher.assert_nothing_left()


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("JoinAccepted", {"run_id": "x", "heartbeat_timeout_s": 2.0, "node_rank": 1}),
        ("StopAttempt", {"attempt": 0, "signal": 15, "grace_s": 1e308}),
        ("StopAttempt", {"attempt": 0, "signal": 19, "grace_s": 1.0}),
        ("EndJob", {"outcome": {"code": 256}}),
        ("EndJob", {"outcome": {"code": 0, "usage_error": ["no", None]}}),
    ],
)
def test_an_impossible_message_of_node_0_is_a_protocol_error(op, body):
    with pytest.raises(ProtocolError):
        decode_message(op, body, load_features().message_types(FromNodeZero))


def test_node_0_decides_the_exit_code(node_zero):
    """It does so also if it sends a request to a node that was interrupted and has drained."""
    false, launcher = node_zero()
    peer = false.meet()
    peer.send("StartAttempt", attempt=0, run_id="theirs", assignment=make_assignment(1))
    launcher.wait_for("up")
    launcher.signal(signal.SIGINT)
    assert peer.receive("StopRequested")
    peer.send("StopAttempt", attempt=0, signal=15, grace_s=0.0)
    assert peer.receive("AttemptReport")
    peer.send("RpcRequest", serial=1, kind="inspect", timeout_s=5.0, payload="state")
    assert peer.receive("RpcReply")["kind"] == "inspect"
    peer.send("EndJob", {"outcome": {"code": 143}})
    assert launcher.wait(20) == 143


def test_a_node_that_is_stopped_while_it_joins_notifies_node_0(node_zero):
    """The answer to its hello may be on its way: node 0 then counts it as joined."""
    false, launcher = node_zero()
    peer = false.greet()
    launcher.signal(signal.SIGTERM)
    assert peer.receive("StopRequested") == {"signal": signal.SIGTERM}
    assert launcher.wait() == 143


def test_a_connection_that_is_reset_right_after_the_start(node_zero):
    """The order may be read, or be gone with the connection: that is the kernel's affair."""
    false, launcher = node_zero("--join-timeout", "1")
    peer = false.meet()
    peer.send("StartAttempt", attempt=0, run_id="theirs", assignment=make_assignment(1))
    peer.reset()
    false.close()
    assert launcher.wait(20) == 69, launcher.stderr()
    assert_clean(launcher.stderr())
    launcher.assert_nothing_left()
