"""Replays of the job's machine: histories of events, without processes, sockets or a real clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import TypeVar

import pytest
from msgspec.structs import replace

from ddplaunch.base.options import Options
from ddplaunch.core import messages
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import Feature
from ddplaunch.core.job import job_attempt
from ddplaunch.core.job.attempt_machine import EARLY_REPORT_DELAY_S
from ddplaunch.core.job.commands import Accept, Disconnect, Refuse, Send
from ddplaunch.core.job.job_events import (
    ClockMeasured,
    ConnectionLost,
    DeadlineDue,
    HelloReceived,
    MessageReceived,
    Start,
)
from ddplaunch.core.job.joining import REPORT_TIMEOUT_S
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.core.job.node_checks import CHECK_TIMEOUT_S, SLOW_NODE_NOTICE_S
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.messages import Message, NodeHello
from ddplaunch.core.options import Elastic, Stopping
from ddplaunch.features.check.messages import CheckNode
from ddplaunch.features.check.options import Checking
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions
from tests.core.job_configs import make_job_config

CHECKED = Options({Checking: Checking(check=True)}, {})
"""The options of a job whose nodes check their machines."""

LEAVES = "SIGTERM on node 1 (n1): it leaves the job; stopping the ranks, to continue without it"

M = TypeVar("M", bound=Message)


class Job:
    """A job's machine with simulated nodes and a simulated clock; ``sent`` has the messages to the nodes."""

    def __init__(self, features: Iterable[tuple[str, Feature]] | None = None, **rules: object) -> None:
        self.now = 0.0
        self.sent: list[tuple[int, Message]] = []
        self.disconnected: list[int] = []
        self.replies: list[Accept | Refuse] = []
        self.rules = make_job_config(**{"max_nodes": rules.get("min_nodes", 1), "inspect": False, **rules})  # type: ignore[arg-type]
        self.start(self.hello(0), features)

    def start(self, hello: NodeHello, features: Iterable[tuple[str, Feature]] | None = None) -> None:
        self.machine = JobMachine(self.rules, hello, "id", features)
        self.on(Start())

    def on(self, event: MachineEvent) -> None:
        """Let an event happen now."""
        for command in self.machine.on(event, Now(self.now, time.time())):
            match command:
                case Send(number, message):
                    self.sent.append((number, message))
                case Disconnect(number):
                    self.disconnected.append(number)
                case Accept() | Refuse():
                    self.replies.append(command)

    def hello(self, number: int, **changed: object) -> NodeHello:
        share = NodeSpec(number, f"n{number}", ("cpu", "cpu"))
        fields = {
            "node_spec": share, "nnodes": self.rules.nnodes_text, "run_id": None, "target": "train.py",
            "fingerprint": "abc", "max_restarts": self.rules.options[Stopping].max_restarts,
            "versions": Versions("3.11", "2.13"), "gpus": (),
        }  # fmt: skip
        return NodeHello(**{**fields, **changed})  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self.machine.wake_at()) is not None and at <= end:
            self.now = max(self.now, at)
            self.on(DeadlineDue())
        self.now = end

    def join(self, *numbers: int) -> None:
        for number in numbers:
            self.admit(self.hello(number))

    def admit(self, hello: NodeHello) -> NodeHello:
        """Let a node join; return its hello with the node rank that it got."""
        reply = self._reply_to(hello)
        assert isinstance(reply, Accept), reply
        return reply.hello

    def refusal(self, hello: NodeHello) -> messages.JoinRefused:
        reply = self._reply_to(hello)
        assert isinstance(reply, Refuse), reply
        return reply.refusal

    def _reply_to(self, hello: NodeHello) -> Accept | Refuse:
        connection = len(self.replies)
        self.on(HelloReceived(connection, hello))
        (reply,) = self.replies[connection:]
        assert reply.connection == connection
        return reply

    def lose(self, number: int, reason: str = "its connection closed", silent_s: float = 0.0) -> None:
        self.on(ConnectionLost(number, reason, silent_s))

    def send(self, number: int, message: messages.FromNode) -> None:
        self.on(MessageReceived(number, message))

    def fail(
        self, number: int, rank: int, attempt: int = 0, clock: float | None = None, **fields: object
    ) -> RankFailure:
        clock = time.time() if clock is None else clock
        values = {
            "rank": rank, "local_rank": 0, "host": f"n{number}", "pid": 1, "attempt": attempt, "exit_code": 3,
            "signal": None, "message": None, "traceback": None, "moment": clock, "hint": None,
        }  # fmt: skip
        failure = RankFailure(**{**values, **fields})  # type: ignore[arg-type]
        self.send(number, messages.FailureReported(attempt, failure, clock))
        return failure

    def drain(
        self,
        number: int,
        *failures: RankFailure,
        attempt: int = 0,
        stopped: int = 0,
        heeded: bool = False,
        broken: messages.LauncherFailure | None = None,
    ) -> None:
        tails = tuple((failure.rank, failure.tail) for failure in failures)
        self.send(number, messages.AttemptReport(attempt, stopped, time.time(), broken, heeded, tails))

    def take(self, kind: type[M], number: int | None = None) -> list[M]:
        """The messages of this kind that were sent since the last call."""
        found = [m for n, m in self.sent if isinstance(m, kind) and number in (None, n)]
        self.sent = [(n, m) for n, m in self.sent if not (isinstance(m, kind) and number in (None, n))]
        return found

    def outcome(self, number: int) -> messages.EndJob:
        (end,) = self.take(messages.EndJob, number)
        assert isinstance(end, messages.EndJob)
        return end


def joined(*numbers: int, **rules: object) -> Job:
    """A job that these nodes have joined: as many as it has, where ``rules`` do not say."""
    job = Job(**{"min_nodes": len(numbers) + 1, **rules})
    job.join(*numbers)
    return job


def test_all_start_when_the_last_has_joined():
    job = joined(2, min_nodes=3)
    assert not job.take(messages.StartAttempt)
    job.join(1)
    starts = job.take(messages.StartAttempt)
    assert len(starts) == 3
    assert [share.node_rank for share in starts[0].node_specs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rules", "joining", "count", "remark", "missing"),
    [
        ({"min_nodes": 2}, (), "1/2", "1 of 2", "1"),
        ({"min_nodes": 4}, (1,), "2/4", "2 of 4", "2, 3"),
        ({"min_nodes": 30}, (), "1/30", "1 of 30", "1, 2, 3, 4, 5, 6, 7, 8 and 21 more"),
        ({"min_nodes": 3, "max_nodes": 4}, (1,), "2 of 3 to 4", "2 of at least 3", "2, 3"),
    ],
)
def test_missing_nodes_are_named(rules, joining, count, remark, missing):
    job = Job(**rules, join_timeout=60.0)
    job.wait(0)
    job.join(*joining)
    job.wait(59.9)
    first, *later = job.take(messages.JoinStatus, 0)
    assert (first.joined, len(later)) == (1, len(joining))
    assert [first, *later][-1].describe() == f"{count} nodes joined, waiting for node {missing}"
    job.wait(0.1)
    outcome = job.outcome(0).outcome
    are = "is" if missing == "1" else "are"
    reason = f"only {remark} nodes joined in 60 s (--join-timeout): node {missing} {are} missing"
    assert (outcome.code, outcome.remark.splitlines()[0]) == (69, reason)


def test_an_open_join_window_outlasts_the_join_timeout():
    job = joined(1, min_nodes=2, max_nodes=3, join_window=100.0, join_timeout=60.0)
    job.wait(10)
    job.lose(1)
    job.wait(1)
    job.join(1)
    job.wait(1)
    status = job.take(messages.JoinStatus, 1)[-1].describe()
    assert status == "2 of 2 to 3 nodes joined, starting in 100 s unless node 2 joins first"
    job.wait(50)
    assert not job.take(messages.EndJob)
    job.lose(1)
    job.wait(60)
    assert job.outcome(0).outcome.code == 69


def test_a_node_that_leaves_while_others_are_awaited_may_come_back():
    job = joined(1, min_nodes=3)
    job.lose(1)
    job.join(2)
    assert not job.take(messages.StartAttempt)
    job.join(1)
    assert len(job.take(messages.StartAttempt)) == 3


VERSIONS = Versions("3.11", "2.13", "12.4", "2.20")
OURS = {"versions": VERSIONS, "gpus": ("H100",)}
"""Of node 0, with which other nodes are compared."""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"nnodes": "3"}, "--nnodes differs: node 0 (n0) has 2, node 1 (n1) has 3"),
        ({"run_id": "x"}, "the run id differs: node 0 (n0) has none, node 1 (n1) has x"),
        ({"fingerprint": "abd"}, "the content of train.py differs: node 0 (n0) has abc, node 1 (n1) has abd"),
        ({"max_restarts": 2}, "--max-restarts differs: node 0 (n0) has 0, node 1 (n1) has 2"),
        (
            {"versions": replace(VERSIONS, python="3.12")},
            "the Python version differs: node 0 (n0) has 3.11, node 1 (n1)",
        ),
        (
            {"versions": replace(VERSIONS, torch="2.4")},
            "torch's version differs: node 0 (n0) has 2.13, node 1 (n1) has",
        ),
        ({"versions": replace(VERSIONS, cuda=None)}, "of torch differs: node 0 (n0) has 12.4, node 1 (n1) has none"),
        ({"versions": replace(VERSIONS, nccl="2.21")}, "NCCL version differs: node 0 (n0) has 2.20, node 1 (n1) has"),
        ({"gpus": ()}, "the kind of devices differs: node 0 (n0) has H100, node 1 (n1) has CPUs alone"),
        ({"node_spec": NodeSpec(0, "n9", ("cpu",))}, "node rank 0 is used twice: by n0 and by n9"),
        ({"node_spec": NodeSpec(2, "n9", ("cpu",))}, "node rank 2 is out of range: 0 to 1"),
        (
            {"node_spec": NodeSpec(1, "n1", ("cpu",), kind="task")},
            "task 1 (n1) is one rank, but node 0 (n0), alone on its host, starts 2",
        ),
    ],
)
def test_nodes_with_different_settings_end_the_job(changed, expected):
    job = Job(min_nodes=2)
    job.start(job.hello(0, **OURS))
    assert expected in job.refusal(job.hello(1, **{**OURS, **changed})).message
    outcome = job.outcome(0).outcome
    assert outcome.code == 2
    assert expected in outcome.usage_error[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "note"),
    [
        ({}, {}, None),
        ({}, {"gpus": ("A100", "V100")}, "the GPU model differs: node 0 (n0) has H100, node 1 (n1) has A100 and V100"),
        ({"gpus": ()}, {"gpus": ()}, None),
        ({}, {"fingerprint": None}, None),
        ({}, {"versions": Versions("3.11", cuda="12.1")}, None),
        ({}, {"versions": replace(VERSIONS, nccl=None)}, None),
        ({"node_spec": NodeSpec(0, "n0", ("cpu",))}, {"node_spec": NodeSpec(1, "n1", ("cpu",), kind="task")}, None),
    ],
)
def test_what_may_differ_between_nodes(ours, theirs, note):
    """A value that one of the nodes does not know may differ too."""
    job = Job(min_nodes=2)
    job.start(job.hello(0, **{**OURS, **ours}))
    job.admit(job.hello(1, **{**OURS, **theirs}))
    slow = ": the slower ones set the pace"
    assert [each.text for each in job.take(messages.NoteMessage, 1)] == ([note + slow] if note else [])


def test_mismatched_versions_can_be_allowed():
    job = Job(min_nodes=2, allow_mismatch=True)
    hello = job.hello(1, versions=Versions("3.12", "2.4"))
    job.admit(hello)
    assert [note.text for note in job.take(messages.NoteMessage, 1)] == [
        "the Python version differs: node 0 (n0) has 3.11, node 1 (n1) has 3.12",
        "torch's version differs: node 0 (n0) has 2.13, node 1 (n1) has 2.4",
    ]


@pytest.mark.parametrize(
    ("joining", "run_id", "refused", "note", "code"),
    [
        (False, None, "node 1 (n1): no torch", None, 2),
        (False, "x", "this is another job", None, None),
        (True, None, "node 1 (n1): no torch", "node 1 (n1): no torch; it does not take part", None),
        (True, "x", "this is another job", None, None),
    ],
)
def test_a_node_that_cannot_join(joining, run_id, refused, note, code):
    """It ends the job that waits for it, but no job that runs without it."""
    job = Job(min_nodes=1 if joining else 2, max_nodes=2, join_window=0.0)
    job.wait(0)
    job.on(HelloReceived(0, messages.JoinDeclined(1, "n1", "no torch", None, run_id)))
    (refusal,) = job.replies
    assert refusal.refusal.message == refused
    assert [each.text for each in job.take(messages.NoteMessage)] == ([note] if note else [])
    assert [end.outcome.code for end in job.take(messages.EndJob)] == ([code] if code else [])


def test_the_first_failure_stops_all_and_is_sent_to_all():
    job = joined(1)
    failure = job.fail(1, 2)
    assert [stop.signal for stop in job.take(messages.StopAttempt)] == [signal.SIGTERM] * 2
    job.drain(1, failure, stopped=1)
    job.drain(0, stopped=2)
    outcomes = [job.outcome(number).outcome for number in (0, 1)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].code == 3
    assert (outcomes[0].verdict.first.rank, outcomes[0].verdict.stopped) == (2, 3)


def test_a_failure_is_reported_early_once():
    """One report comes although another rank fails while the ranks are still inspected."""
    job = joined(1, inspect=True)
    job.fail(1, 2)
    job.wait(EARLY_REPORT_DELAY_S)
    job.fail(0, 0)
    job.wait(5)
    assert [note.text.splitlines()[0] for note in job.take(messages.NoteMessage, 0)] == [
        "rank 2 exited with code 3 (on n1)"
    ]


def test_a_failure_is_sent_once_and_its_last_lines_with_the_report():
    """The failure of a rank that was being stopped is sent too."""
    job = joined(1)
    job.fail(1, 2, message="ValueError: boom", traceback="Traceback …\n  here")
    job.fail(0, 1, message="OSError: while it was stopped")
    job.send(0, messages.AttemptReport(0, 1, time.time()))
    job.send(1, messages.AttemptReport(0, 1, time.time(), tails=((2, ("its", "last lines")),)))
    verdict = job.outcome(0).outcome.verdict
    assert verdict
    assert (verdict.first.traceback, verdict.first.tail) == ("Traceback …\n  here", ("its", "last lines"))
    assert [(other.rank, other.message, other.tail) for other in verdict.others] == [
        (1, "OSError: while it was stopped", ())
    ]
    assert verdict.stopped == 2


def test_moments_are_compared_on_one_clock():
    """The node whose clock is an hour behind did not fail first."""
    job = joined(1)
    behind = time.time() - 3600
    job.fail(0, 0, exit_code=4)
    job.fail(1, 2, exit_code=5, clock=behind, moment=behind + 1)
    job.send(0, messages.AttemptReport(0, 0, time.time()))
    job.send(1, messages.AttemptReport(0, 0, behind))
    assert job.outcome(0).outcome.verdict.first.rank == 0


def test_the_clock_offset_of_a_node_is_kept():
    job, offset = joined(1), ClockOffset(3.0, 0.1)
    for number in (1, 9):  # the other one has left
        job.on(ClockMeasured(number, offset))
    assert job.machine._nodes[1].clock_offset == offset


def test_all_nodes_restart_together():
    job = joined(1, max_restarts=1, min_uptime=0.0)
    job.take(messages.StartAttempt)
    job.drain(1, job.fail(1, 2))
    assert not job.take(messages.StartAttempt)
    job.drain(0)
    again = job.take(messages.Restarting)
    assert "restart 1 of 1" in again[0].text
    job.wait(0)
    assert [start.attempt for start in job.take(messages.StartAttempt)] == [1, 1]
    job.take(messages.StopAttempt)
    job.fail(0, 0, attempt=0)
    assert not job.take(messages.StopAttempt), "a message of the attempt before"
    job.drain(0, job.fail(0, 0, attempt=1), attempt=1)
    job.drain(1, attempt=1)
    assert "no restarts left" in job.outcome(1).outcome.remark


def test_a_lost_node_ends_a_job_of_fixed_size():
    job = joined(1, max_restarts=5)
    job.lose(1)
    assert job.take(messages.NodeLost, 0) == [messages.NodeLost("n1")]
    assert len(job.take(messages.StopAttempt, 0)) == 1
    job.drain(0, job.fail(0, 0, message="RuntimeError: Connection reset by peer"))
    outcome = job.outcome(0).outcome
    assert outcome.code == 69
    assert outcome.remark == "node 1 (n1) was lost: its connection closed"
    assert outcome.verdict is None


def test_a_failure_long_before_the_loss_is_the_headline():
    job = joined(1)
    failure = job.fail(0, 0, moment=time.time() - 20)
    job.lose(1)
    job.drain(0, failure)
    assert job.outcome(0).outcome.code == 3


@pytest.mark.parametrize(
    ("number", "fields", "code"),
    [
        (1, {"message": "ValueError: boom"}, 3),  # on the node that was lost then
        (0, {"exit_code": None, "signal": 9}, 137),  # nothing that a lost peer does to a rank
        (0, {"message": "RuntimeError: my peer is silent"}, 69),  # perhaps a word for the loss
    ],
)
def test_a_failure_just_before_the_loss(number, fields, code):
    """Or after the last sign of life of a node that is lost."""
    job = joined(1)
    failure = job.fail(number, number * 2, **fields)
    job.lose(1)
    job.drain(0, *([failure] * (number == 0)))
    assert job.outcome(0).outcome.code == code
    silent = joined(1)
    failure = silent.fail(0, 0)
    silent.lose(1, silent_s=5.0)
    silent.drain(0, failure)
    assert silent.outcome(0).outcome.code == 69


def test_a_signal_on_every_node_at_once_counts_as_one():
    """Slurm and Kubernetes send theirs to all: the grace is for saving."""
    job = joined(1)
    job.send(0, messages.StopRequested(signal.SIGTERM))
    job.send(1, messages.StopRequested(signal.SIGTERM))
    assert {stop.grace_s for stop in job.take(messages.StopAttempt)} == {30.0}
    job.send(1, messages.StopRequested(signal.SIGTERM, again=True))
    assert {stop.grace_s for stop in job.take(messages.StopAttempt)} == {0.0}


def test_a_node_may_leave_after_its_ranks_have_ended():
    job = joined(1)
    job.send(1, messages.RanksFinished(0))
    job.drain(1)
    job.lose(1)
    job.send(0, messages.RanksFinished(0))
    job.drain(0)
    assert job.outcome(0).outcome.code == 0


def test_finished_nodes_show_which_nodes_they_wait_for():
    """They show it again only if these are others than before."""
    job = joined(1, 2, 3)
    for number in (1, 2):
        job.send(number, messages.RanksFinished(0))
    job.drain(1)
    for seconds, shown, waiting in ((1, (1, 2), "node 0 (n0), node 3 (n3)"), (30, (1, 2, 3), "node 0 (n0)")):
        job.wait(seconds - 0.1)
        assert not job.take(messages.NoteMessage)
        job.wait(0.1)
        for number in shown:
            text = f"the ranks of this node are done; waiting for {waiting}"
            assert job.take(messages.NoteMessage, number) == [messages.NoteMessage(text)]
        job.send(3, messages.RanksFinished(0))
    job.wait(100)
    assert not job.take(messages.NoteMessage)


def test_a_failure_is_sent_to_nodes_that_have_finished():
    job = joined(1)
    job.send(1, messages.RanksFinished(0))
    job.drain(1)
    job.drain(0, job.fail(0, 1))
    assert job.outcome(1).outcome.code == 3


def test_ctrl_c_on_any_node_stops_all():
    job = joined(1)
    job.send(1, messages.StopRequested(signal.SIGINT))
    assert job.take(messages.NoteMessage, 0)[0].text == "Ctrl-C on node 1 (n1)"
    job.send(1, messages.StopRequested(signal.SIGINT, again=True))
    assert [stop.grace_s for stop in job.take(messages.StopAttempt, 0)] == [30, 0]
    job.drain(0)
    job.drain(1)
    assert job.outcome(0).outcome.code == 130


def test_a_requested_stop_names_its_command_and_node():
    job = joined(1)
    job.send(1, messages.StopRequested(signal.SIGINT, reason="`ddplaunch stop` was called"))
    assert [note.text for note in job.take(messages.NoteMessage)] == ["`ddplaunch stop` was called on node 1 (n1)"]
    job.drain(0)
    job.drain(1)
    assert job.outcome(0).outcome.remark == "stopped because `ddplaunch stop` was called"


def test_an_interrupt_ends_the_wait_for_nodes():
    job = joined(1, min_nodes=3)
    job.send(1, messages.StopRequested(signal.SIGTERM))
    assert job.outcome(0).outcome.code == 143


def test_an_elastic_job_waits_for_more_nodes_during_the_join_window():
    job = Job(min_nodes=2, max_nodes=4, join_window=30.0)
    job.wait(100)
    job.join(3)
    job.wait(29)
    assert not job.take(messages.StartAttempt)
    job.wait(1)
    assert [share.node_rank for share in job.take(messages.StartAttempt)[0].node_specs] == [0, 3]


def test_the_window_begins_anew_when_too_few_are_left():
    job = joined(1, max_nodes=3, join_window=10.0)
    job.wait(5)
    job.lose(1)
    job.wait(20)
    job.join(1)
    job.wait(9)
    assert not job.take(messages.StartAttempt)
    job.wait(1)
    assert job.take(messages.StartAttempt)


def test_an_elastic_job_continues_with_fewer_nodes_and_adds_new_ones():
    job = joined(1, 2, min_nodes=2, max_nodes=3, min_uptime=0.0, max_restarts=1)
    job.take(messages.StartAttempt)
    job.lose(1)
    job.drain(0)
    job.drain(2)
    job.wait(0)
    assert [share.node_rank for share in job.take(messages.StartAttempt)[0].node_specs] == [0, 2]
    job.join(1)
    assert "has joined; it takes part when the ranks start next" in job.take(messages.NoteMessage, 1)[-1].text
    job.drain(2, job.fail(2, 2, attempt=1), attempt=1)
    job.drain(0, attempt=1)
    job.wait(0)
    starts = job.take(messages.StartAttempt)
    assert len(starts) == 3
    assert starts[0].attempt == 2


def test_a_membership_change_does_not_use_a_restart():
    job = joined(1, min_nodes=1, max_nodes=2, max_restarts=0, max_membership_changes=1)
    job.lose(1)
    job.drain(0)
    job.wait(0)
    assert len(job.take(messages.StartAttempt, 0)) == 2
    job.join(1)
    job.lose(1, "it went")
    assert not job.take(messages.StopAttempt, 0)[1:], "it took no part"


@pytest.mark.parametrize(("most", "code"), [(3, None), (2, 69)])
def test_a_node_lost_in_the_wait_before_a_restart(most, code):
    """The restart happens once, at the planned time, with the remaining nodes; a job of fixed size ends."""
    job = joined(*range(1, most), min_nodes=2, max_nodes=most, max_restarts=1, restart_backoff=5.0)
    job.take(messages.StartAttempt)
    job.drain(0, job.fail(0, 0))
    for number in range(1, most):
        job.drain(number)
    job.wait(1)
    job.take(messages.NoteMessage)
    job.lose(1)
    assert not job.take(messages.StartAttempt)
    job.wait(10)
    if code is None:
        assert [each.text for each in job.take(messages.NoteMessage, 0)] == [
            "node 1 (n1) was lost: its connection closed"
        ]
        assert [start.attempt for start in job.take(messages.StartAttempt)] == [1, 1]
    else:
        assert job.outcome(0).outcome.code == code
        assert not job.take(messages.StartAttempt)


def test_membership_changes_are_counted():
    job = joined(1, 2, min_nodes=1, max_nodes=3, max_membership_changes=1)
    job.lose(1)
    job.drain(0)
    job.drain(2)
    job.wait(0)
    job.lose(2)
    job.drain(0, attempt=1)
    outcome = job.outcome(0).outcome
    assert outcome.code == 69
    assert "limit reached (--max-membership-changes 1)" in outcome.remark


@pytest.mark.parametrize(("lost", "count"), [(3, 3), (1, 2)])
def test_a_spare_lost_between_attempts_is_no_membership_change(lost, count):
    job = joined(1, 2, 3, min_nodes=2, max_nodes=4, spares=2, max_restarts=1, max_membership_changes=1)
    job.drain(0, job.fail(0, 0))
    job.drain(1)
    job.lose(lost)
    job.wait(5)
    job.lose(2 if lost == 1 else 1)
    job.drain(0, attempt=1)
    job.wait(5)
    assert len(job.take(messages.StartAttempt, 0)) == count


def test_an_elastic_job_ends_with_too_few_nodes():
    job = joined(1, 2, min_nodes=2, max_nodes=3)
    job.lose(1)
    job.lose(2)
    job.drain(0)
    assert "1 of at least 2 nodes are left" in job.outcome(0).outcome.remark


def test_a_node_of_another_job_does_not_disturb_a_running_job():
    job = joined(1)
    assert job.refusal(job.hello(1))
    assert job.refusal(job.hello(1, max_restarts=9))
    assert not job.take(messages.EndJob)


@pytest.mark.parametrize("finished", [True, False])
def test_a_node_that_joins_while_ranks_end_is_noted(finished):
    job = joined(1, min_nodes=2, max_nodes=3, join_window=0.0, grow=True)
    job.wait(0)
    job.send(1, messages.RanksFinished(0) if finished else messages.StopRequested(signal.SIGINT))
    job.take(messages.NoteMessage)
    job.join(2)
    (note,) = job.take(messages.NoteMessage, 0)
    assert note.text == "node 2 (n2) has joined" + (
        ", but the job is about to end" if finished else "; it takes part when the ranks start next"
    )


@pytest.mark.parametrize("why", ["preemption", "lost connection"])
def test_a_node_that_joins_does_not_interrupt_ranks_that_are_about_to_be_stopped(why):
    job = joined(1, min_nodes=2, max_nodes=3, join_window=0.0, grow=True, preempt_grace=20, inspect=False)
    job.wait(0)
    if why == "preemption":
        job.send(1, messages.PreemptionNotice(signal.SIGUSR2))
    else:
        job.fail(1, 2, message="RuntimeError: Connection reset by peer")
    job.take(messages.NoteMessage)
    job.join(2)
    (note,) = job.take(messages.NoteMessage, 0)
    assert note.text == "node 2 (n2) has joined; it takes part when the ranks start next"
    assert not job.take(messages.StopAttempt)
    job.wait(20)
    assert len(job.take(messages.StopAttempt)) == 2


def test_nodes_without_a_rank_get_the_lowest_that_is_free():
    job = Job(min_nodes=4, max_nodes=4)
    asking = [job.hello(1, node_spec=NodeSpec(1, host, ("cpu",)), has_node_rank=False) for host in ("a", "b", "c")]
    given = []
    for hello in asking:
        admitted = job.admit(hello)
        given.append((admitted.node_spec.node_rank, admitted.node_spec.host))
    assert given == [(1, "a"), (2, "b"), (3, "c")]
    assert job.refusal(asking[0]).message == "the job is running already, without this a"


def test_a_node_that_joins_again_keeps_its_node_rank():
    for wanted, given in ((3, 3), (1, 1), (2, 1), (4, 1)):
        job = joined(1, 2, min_nodes=2, max_nodes=4, join_window=60.0)
        job.lose(1)
        assert job.admit(job.hello(wanted, has_node_rank=False)).node_spec.node_rank == given
    assert "node rank 2 is used twice" in job.refusal(job.hello(2)).message, "a typed one stands"


def test_more_nodes_than_the_maximum_are_refused():
    job = joined(1, min_nodes=1, max_nodes=2)
    assert job.refusal(job.hello(1, has_node_rank=False)).message == "all 2 nodes of the job have joined already"
    assert job.refusal(job.hello(2)).message.startswith("node rank 2 is out of range")


def test_a_preemption_notice_reaches_all_nodes_once():
    """Slurm warns every node, and some sooner than others; what a scheduler says anywhere is meant for the job."""
    job = joined(1, 2)
    job.send(1, messages.PreemptionNotice(signal.SIGUSR2))
    assert len(job.take(messages.PreemptRanks)) == 3
    assert {note.text for note in job.take(messages.NoteMessage)} == {
        "preempted by SIGUSR2 on node 1 (n1): ranks have 90 s (--preempt-grace) to save a checkpoint"
    }
    job.send(2, messages.PreemptionNotice(signal.SIGUSR2))
    assert not job.take(messages.PreemptRanks)
    for number in range(3):
        job.send(number, messages.RanksFinished(0))
        job.drain(number, heeded=number == 2)
    assert not job.take(messages.StopAttempt)
    assert {end.outcome.code for end in job.take(messages.EndJob)} == {75}


def test_a_preemption_notice_while_ranks_are_being_stopped_announces_no_other_grace():
    job = joined(1, inspect=False)
    job.fail(1, 2)
    job.take(messages.NoteMessage)
    job.send(0, messages.PreemptionNotice(signal.SIGUSR2))
    (note,) = job.take(messages.NoteMessage, 0)
    assert note.text == "preempted by SIGUSR2 on node 0 (n0): the ranks are being stopped already"


def test_after_a_preemption_notice_a_failure_stops_no_rank_until_the_grace_is_over():
    job = joined(1, max_restarts=3, preempt_grace=20)
    job.send(0, messages.PreemptionNotice(signal.SIGUSR2))
    failure = job.fail(1, 3)
    job.wait(19)
    assert not job.take(messages.StopAttempt)
    job.drain(1, failure)
    job.wait(2)
    (stop,) = job.take(messages.StopAttempt)
    assert (stop.signal, stop.grace_s) == (signal.SIGTERM, 30)
    job.drain(0, stopped=2)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.verdict and outcome.verdict.first.rank) == (75, 3)
    assert not job.take(messages.Restarting)


@pytest.mark.parametrize("joined", [False, True], ids=["while joining", "between attempts"])
def test_a_preemption_notice_while_no_rank_runs(joined):
    job = Job(min_nodes=2, max_restarts=1, restart_backoff=60)
    if joined:
        job.join(1)
        failure = job.fail(1, 2)
        job.drain(1, failure)
        job.drain(0)
        assert job.take(messages.Restarting)
    job.send(0, messages.PreemptionNotice(signal.SIGUSR2))
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.remark) == (75, "preempted by SIGUSR2 on node 0 (n0): no rank was running")


def test_a_stop_signal_after_a_preemption_notice_sets_the_exit_code():
    job = Job()
    job.send(0, messages.PreemptionNotice(signal.SIGUSR2))
    job.send(0, messages.StopRequested(signal.SIGTERM))
    job.drain(0, stopped=2, heeded=True)
    assert job.outcome(0).outcome.code == 143


def test_a_zygote_that_was_lost_in_a_job_of_one_node():
    job = Job()
    job.drain(0, broken=messages.LauncherFailure("the zygote (pid 7) was ended by SIGKILL", time.time()))
    assert job.outcome(0).outcome.remark == "the zygote (pid 7) was ended by SIGKILL", "without a host"


def test_a_node_that_has_drained_may_still_send_what_is_not_about_its_ranks():
    """Its report may overtake nothing: a message of a feature may come after it."""
    job = joined(1)
    job.send(1, messages.RanksFinished(0))
    job.drain(1)
    job.send(1, messages.ProgressResumed(0))
    assert not job.disconnected


def test_a_zygote_that_was_lost_after_a_failure_is_not_the_cause():
    job = joined(1)
    failure = job.fail(0, 0, message="ValueError: mine")
    job.drain(1, broken=messages.LauncherFailure("the zygote (pid 7) was ended by SIGKILL", time.time() + 5))
    job.drain(0, failure)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.remark) == (3, None)
    assert outcome.verdict
    assert outcome.verdict.first.message == "ValueError: mine"


@pytest.mark.parametrize("message", ["RuntimeError: connection closed by peer", "OSError: a word that we do not know"])
def test_a_zygote_that_was_lost_before_a_failure_is_the_cause(message):
    """An exception elsewhere, right after, may be a word for it."""
    job = joined(1)
    lost = time.time()
    failure = job.fail(0, 0, message=message, clock=lost + 0.5)
    job.drain(1, broken=messages.LauncherFailure("the zygote (pid 7) was ended by SIGKILL", lost))
    job.drain(0, failure)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.remark) == (137, "the zygote (pid 7) was ended by SIGKILL (on n1)")


@pytest.mark.parametrize("restart_on", ["any", "transient", "always"])
def test_a_zygote_that_was_lost_uses_a_restart(restart_on):
    job = joined(1, max_restarts=1, restart_on=restart_on, restart_backoff=0)
    for attempt in (0, 1):
        assert len(job.take(messages.StartAttempt)) == 2
        broken = messages.LauncherFailure("the zygote (pid 7) was ended by SIGKILL", time.time())
        job.drain(1, attempt=attempt, broken=broken)
        assert len(job.take(messages.StopAttempt, 0)) == 1
        job.drain(0, attempt=attempt, stopped=2)
        if attempt == 0:
            again = job.take(messages.Restarting)[0]
            assert isinstance(again, messages.Restarting)
            assert again.text == "the zygote (pid 7) was ended by SIGKILL (on n1)\nrestart 1 of 1"
            job.wait(0)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.verdict) == (137, None)
    assert outcome.remark == "the zygote (pid 7) was ended by SIGKILL (on n1); no restarts left (--max-restarts 1)"


def test_a_node_without_an_attempt_report_is_lost():
    job = joined(1, 2, grace=7.0)
    job.send(0, messages.StopRequested(signal.SIGINT))
    job.drain(0)
    job.drain(2)
    job.wait(7 + REPORT_TIMEOUT_S - 0.1)
    assert not job.take(messages.EndJob)
    job.wait(0.2)
    assert job.disconnected == [1]
    assert job.outcome(0).outcome.code == 130
    assert job.outcome(2).outcome.code == 130
    (note,) = [note.text for note in job.take(messages.NoteMessage, 0) if "lost" in note.text]
    assert note.startswith("node 1 (n1) was lost: ")
    assert "37 s" in note


def test_a_node_without_an_attempt_report_is_lost_after_success_too():
    job = joined(1)
    for number in (0, 1):
        job.send(number, messages.RanksFinished(0))
    job.drain(0)
    job.wait(30 + REPORT_TIMEOUT_S)
    outcome = job.outcome(0).outcome
    assert outcome.code == 69
    assert outcome.remark == "node 1 (n1) was lost: it did not report the end of its ranks within 60 s"


def test_a_stop_without_grace_shortens_the_report_timeout():
    """A longer grace does not extend it."""
    job = joined(1)
    job.wait(100)
    job.send(0, messages.StopRequested(signal.SIGINT))
    job.wait(20)
    job.send(0, messages.StopRequested(signal.SIGINT, again=True))
    job.drain(0)
    job.wait(10)
    job.send(1, messages.RanksFinished(0))
    job.wait(REPORT_TIMEOUT_S - 10.1)
    assert not job.disconnected
    job.wait(0.1)
    assert job.disconnected == [1]


def test_the_report_timeout_ends_with_the_report():
    job = joined(1, max_restarts=1)
    failure = job.fail(1, 2)
    job.drain(0)
    job.drain(1, failure)
    assert job.take(messages.Restarting)
    job.wait(0)
    job.wait(1000)
    assert not job.take(messages.EndJob)


def checking(*numbers: int, **rules: object) -> Job:
    """A job that asks its nodes to check their machines."""
    return joined(*numbers, options=CHECKED, **rules)


LACK = messages.NodeStartError("12 MiB free in /dev/shm (64 MiB needed)", "remove something")


def test_a_slow_check_of_a_node_is_noted():
    job = checking(1, min_nodes=2)
    job.send(0, messages.CheckPassed(0))
    job.wait(SLOW_NODE_NOTICE_S)
    assert job.take(messages.NoteMessage, 0)[-1].text == "waiting for the check of node 1 (n1)"


def test_a_check_that_never_answers():
    """Each check has timeouts of its own, so this is a bug, which is no reason to leave out a machine."""
    job = checking(1, min_nodes=2)
    job.send(0, messages.CheckPassed(0))
    job.wait(CHECK_TIMEOUT_S - 1)
    assert not job.take(messages.StartAttempt)
    job.wait(1)
    expected = "the check of node 1 (n1) has not answered in 25 s: the ranks start without it"
    assert job.take(messages.NoteMessage, 1)[-1].text == expected
    assert len(job.take(messages.StartAttempt)) == 2


def test_a_check_that_goes_on_is_waited_for():
    job = checking(1, 2, min_nodes=3)
    for _ in range(3):
        job.wait(CHECK_TIMEOUT_S - 1)
        job.send(1, messages.CheckContinues(0))
        job.send(2, messages.CheckContinues(0))
        job.send(0, messages.CheckContinues(0))
    job.send(0, messages.CheckPassed(0))
    job.send(1, messages.CheckContinues(1))  # of another attempt
    notes = [each.text for each in job.take(messages.NoteMessage, 0)]
    assert notes == ["waiting for the check of node 0 (n0), node 1 (n1), node 2 (n2)"]
    job.wait(CHECK_TIMEOUT_S - 1)
    job.send(2, messages.CheckContinues(0))
    job.wait(1)
    silent = "the check of node 1 (n1) has not answered in 25 s: the ranks start without it"
    assert [each.text for each in job.take(messages.NoteMessage, 0)] == [silent]
    assert not job.take(messages.StartAttempt)
    job.send(2, messages.CheckPassed(0))
    assert len(job.take(messages.StartAttempt)) == 3


def test_a_check_that_never_answers_on_the_only_machine():
    job = checking()
    job.wait(CHECK_TIMEOUT_S)
    expected = "the check of this machine has not answered in 25 s: the ranks start without it"
    assert job.take(messages.NoteMessage, 0)[-1].text == expected
    assert len(job.take(messages.StartAttempt)) == 1


def test_an_elastic_job_leaves_out_a_node_with_a_failed_check():
    job = checking(1, 2, min_nodes=2, max_nodes=3)
    for number in (0, 2):
        job.send(number, messages.CheckPassed(0))
    job.send(1, LACK)
    assert [share.node_rank for share in job.take(messages.StartAttempt)[0].node_specs] == [0, 2]
    left_out = "node 1 (n1) is left out: 12 MiB free in /dev/shm (64 MiB needed)"
    assert job.take(messages.NoteMessage, 2)[-1].text == left_out
    assert job.outcome(1).outcome.usage_error == (left_out, "remove something")
    job.take(CheckNode)
    job.join(1)
    assert not job.take(CheckNode), "it is asked at the next start"
    job.send(2, messages.NodeStartError("no log", None))
    assert job.outcome(0).outcome.usage_error == ("node 2 (n2): no log", None), "its check was before"


def test_too_few_nodes_pass_their_checks():
    job = checking(1, min_nodes=2, max_nodes=3)
    job.wait(job.rules.options[Elastic].join_window)
    job.send(1, LACK)
    (text, _), code = job.outcome(0).outcome.usage_error, job.outcome(1).outcome.code
    assert text.endswith("needed); without it 1 of at least 2 nodes are left")
    assert code == 2
    assert not job.take(messages.StartAttempt)


def test_a_failed_check_before_a_restart():
    job = checking(1, min_nodes=2, max_restarts=1)
    for number in (0, 1):
        job.send(number, messages.CheckPassed(0))
    job.drain(0, job.fail(0, 0))
    job.drain(1)
    job.wait(0)
    assert [check.attempt for check in job.take(CheckNode)][-2:] == [1, 1]
    job.send(1, LACK)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.verdict.first.rank) == (3, 0)
    assert outcome.remark == "no restart: node 1 (n1): 12 MiB free in /dev/shm (64 MiB needed)"


def test_a_node_that_is_lost_during_its_check():
    job = checking(1, 2, min_nodes=2, max_nodes=3)
    for number in (0, 2):
        job.send(number, messages.CheckPassed(0))
    job.lose(1)
    assert len(job.take(messages.StartAttempt)) == 2


def test_a_node_that_joins_during_checks_is_checked_too():
    job = checking(1, min_nodes=2, max_nodes=3)
    job.wait(job.rules.options[Elastic].join_window)
    assert [check.attempt for check in job.take(CheckNode)] == [0, 0]
    job.join(2)
    for number in (0, 1):
        job.send(number, messages.CheckPassed(0))
    assert not job.take(messages.StartAttempt)
    job.send(2, messages.CheckPassed(0))
    assert len(job.take(messages.StartAttempt)) == 3


def test_a_new_node_interrupts_the_ranks_after_its_check():
    job = checking(min_nodes=1, max_nodes=2, grow=True)
    job.wait(job.rules.options[Elastic].join_window)
    job.send(0, messages.CheckPassed(0))
    assert len(job.take(messages.StartAttempt)) == 1
    job.join(1)
    assert not job.take(messages.StopAttempt)
    job.send(1, LACK)
    assert not job.take(messages.StopAttempt)
    job.outcome(1)
    job.join(1)
    job.send(1, messages.CheckPassed(0))
    assert len(job.take(messages.StopAttempt)) == 1
    job.drain(0, stopped=2)
    job.wait(0)
    job.send(0, messages.CheckPassed(1))
    assert not job.take(messages.StartAttempt), "the other is to look once more"
    job.send(1, messages.CheckPassed(1))
    assert len(job.take(messages.StartAttempt)) == 2


def test_a_new_node_with_a_failed_check_while_the_ranks_fail():
    """The new node was checked as it joined; the others restart at the planned time, after a check of their own."""
    job = checking(min_nodes=1, max_nodes=2, grow=True, max_restarts=1, restart_backoff=5.0)
    job.wait(job.rules.options[Elastic].join_window)
    job.send(0, messages.CheckPassed(0))
    job.join(1)
    job.drain(0, job.fail(0, 0))
    job.take(CheckNode)
    job.take(messages.StartAttempt)
    job.send(1, LACK)
    assert job.outcome(1).outcome.code == 2
    assert not job.take(CheckNode) + job.take(messages.StartAttempt)
    job.wait(5)
    assert len(job.take(CheckNode)) == 1
    job.send(0, messages.CheckPassed(1))
    assert len(job.take(messages.StartAttempt)) == 1


def test_a_lost_node_and_a_failed_check_of_another():
    job = checking(1, 2, min_nodes=2, max_nodes=3)
    for number in (0, 1, 2):
        job.send(number, messages.CheckPassed(0))
    job.lose(1)
    job.drain(0)
    job.drain(2)
    job.wait(0)
    job.send(2, LACK)
    outcome = job.outcome(0).outcome
    assert outcome.code == 69
    assert outcome.remark.startswith("no restart: node 2 (n2): 12 MiB free in /dev/shm")


def test_an_interrupt_ends_the_checks():
    job = checking(1, min_nodes=2)
    job.send(1, messages.StopRequested(signal.SIGINT))
    assert [job.outcome(number).outcome.code for number in (0, 1)] == [130, 130]


def notes_of(job: Job, number: int = 0) -> list[str]:
    return [
        message.text for message in job.take(messages.NoteMessage, number) if isinstance(message, messages.NoteMessage)
    ]


def terminate(job: Job, number: int, **fields: bool) -> None:
    job.send(number, messages.StopRequested(signal.SIGTERM, **fields))


def test_sigterm_takes_one_node_out_of_an_elastic_job():
    job = joined(1, 2, min_nodes=2, max_nodes=3)
    job.take(messages.StartAttempt)
    terminate(job, 1)
    assert notes_of(job) == [LEAVES]
    assert [stop.signal for stop in job.take(messages.StopAttempt)] == [signal.SIGTERM] * 3
    job.drain(1, job.fail(1, 2, exit_code=None, signal=signal.SIGTERM))
    outcome = job.outcome(1).outcome  # it need not wait for the others
    assert (outcome.code, outcome.remark) == (143, "SIGTERM: this node has left the job, which continues without it")
    terminate(job, 1)
    job.lose(1)
    job.drain(0)
    job.drain(2)
    job.wait(0)
    assert notes_of(job) == ["going on with 2 nodes: node 0 (n0), node 2 (n2)"]
    starts = job.take(messages.StartAttempt)
    assert [(start.attempt, start.assignment.nnodes) for start in starts] == [(1, 2), (1, 2)]
    job.join(1)
    assert "it takes part" in notes_of(job)[-1]
    terminate(job, 1)
    assert notes_of(job) == ["node 1 (n1) has left: SIGTERM"]
    assert (job.disconnected, job.take(messages.StopAttempt)) == ([1], [])
    terminate(job, 2)
    assert notes_of(job) == ["SIGTERM on node 2 (n2)"], "the job cannot do without it"
    job.drain(0, attempt=1)
    job.drain(2, attempt=1)
    assert {job.outcome(number).outcome.code for number in (0, 2)} == {143}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("came", [signal.SIGINT, signal.SIGTERM])
def test_node_0_and_ctrl_c_end_an_elastic_job(number, came):
    job = joined(1, 2, min_nodes=1, max_nodes=3)
    leaves = number and came == signal.SIGTERM
    job.send(number, messages.StopRequested(came))
    if leaves:  # the scheduler ends the whole job: node 0 gets its signal last
        terminate(job, 0)
    for node in range(3):
        job.drain(node)
    assert job.outcome(0).outcome.code == 128 + came


def test_ctrl_c_on_a_node_that_leaves_ends_the_job_with_the_grace():
    job = joined(1, 2, min_nodes=1, max_nodes=3)
    terminate(job, 1)
    job.take(messages.StopAttempt)
    job.send(1, messages.StopRequested(signal.SIGINT, again=True))
    assert {(stop.signal, stop.grace_s) for stop in job.take(messages.StopAttempt)} == {(signal.SIGINT, 30.0)}


def test_nodes_leave_during_joining_checks_and_restarts():
    job = joined(1, min_nodes=2, max_nodes=3, options=CHECKED, max_restarts=1, restart_backoff=5.0)
    terminate(job, 1)
    assert notes_of(job) == ["node 1 (n1) has left: SIGTERM"]
    job.join(1, 2)
    assert job.take(CheckNode, 2)
    terminate(job, 2)
    for node in (0, 1):
        job.send(node, messages.CheckPassed(0))
    assert len(job.take(messages.StartAttempt)) == 2
    job.join(2)
    job.take(messages.NoteMessage)
    job.drain(0, job.fail(0, 0))
    job.drain(1)
    terminate(job, 1)
    assert notes_of(job) == ["node 1 (n1) has left: SIGTERM"]
    job.wait(5)
    for node in (0, 2):
        job.send(node, messages.CheckPassed(1))
    assert [start.attempt for start in job.take(messages.StartAttempt)] == [1, 1]


def test_a_failure_before_the_sigterm_is_the_cause_that_counts():
    job = joined(1, 2, min_nodes=2, max_nodes=3)
    failure = job.fail(1, 2, moment=time.time() - 20)
    terminate(job, 1)
    job.drain(1, failure)
    job.drain(0)
    job.drain(2)
    assert job.outcome(0).outcome.code == 3


def test_a_node_that_has_left_gets_one_result_and_may_come_back():
    job = joined(1, 2, min_nodes=2, max_nodes=3)
    terminate(job, 1)
    job.drain(1)
    assert job.outcome(1).outcome.code == 143
    job.join(1)
    assert notes_of(job)[-1] == "node 1 (n1) has joined; it takes part when the ranks start next"
    job.drain(0)
    job.drain(2)
    job.wait(0)
    assert [number for number, each in job.sent if isinstance(each, messages.StartAttempt)][3:] == [0, 1, 2]
    terminate(job, 0)
    assert not job.take(messages.EndJob, 1), "its new launcher gets the result of the job"
    for number in (0, 1, 2):
        job.drain(number, attempt=1)
    assert job.outcome(1).outcome.code == 143


def test_a_leaving_node_that_is_lost_is_not_waited_for():
    job = joined(1, 2, min_nodes=2, max_nodes=3)
    terminate(job, 1)
    job.drain(0)
    job.drain(2)
    job.lose(1)
    job.wait(0)
    assert [text for text in notes_of(job) if "lost" in text] == []
    assert len(job.take(messages.StartAttempt)) == 3 + 2


@pytest.mark.parametrize("stage", ["preempted", "fixed"])
def test_sigterm_on_one_node_is_for_the_whole_job(stage):
    job = joined(1, min_nodes=1 if stage == "preempted" else 2, max_nodes=2)
    if stage == "preempted":
        job.send(0, messages.PreemptionNotice(signal.SIGUSR2))
    terminate(job, 1)
    assert notes_of(job)[-1] == "SIGTERM on node 1 (n1)"
    job.drain(0)
    job.drain(1)
    assert job.outcome(1).outcome.code == 143


def test_the_failures_of_many_ranks_do_not_fill_the_memory(monkeypatch):
    """The texts of later ones are cut to one line."""
    monkeypatch.setattr(job_attempt, "MAX_FAILURE_CHARS", 50)
    job = joined(1)
    failures = [job.fail(rank // 2, rank, message=f"E{rank}: one\ntwo", traceback="T" * 20) for rank in range(4)]
    for number in (0, 1):
        job.drain(number, *failures[number * 2 : number * 2 + 2])
    verdict = job.outcome(0).outcome.verdict
    assert [(each.message, each.traceback) for each in (verdict.first, *verdict.others)] == [
        ("E0: one\ntwo", "T" * 20), ("E1: one", None), ("E2: one", None), ("E3: one", None),
    ]  # fmt: skip
