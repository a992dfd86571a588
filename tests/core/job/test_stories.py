"""Stories of a job: what happens when, and all commands that follow from it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from ddplaunch.base.text import signal_name
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import Feature, JobContext, JobSide
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.core.machine import Command, MachineEvent
from tests.core.job.test_machine import Job

WALL = 1e9
"""The time since 1970 at the start."""


def describe(message: messages.Message) -> str:
    """A message in a few words."""
    match message:
        case messages.StartAttempt(attempt=attempt):
            return f"start attempt {attempt}"
        case messages.StopAttempt(signal=number, grace_s=grace_s):
            return f"stop, {signal_name(number)}, {grace_s:g} s"
        case messages.Restarting(attempt=attempt, wait=wait):
            return f"attempt {attempt} follows in {wait:g} s"
        case messages.EndJob(outcome=outcome):
            return f"end, {outcome.code}: {outcome.remark}" if outcome.remark else f"end, {outcome.code}"
        case messages.NoteMessage(text=text):
            return f"note: {text}"
        case _:
            return type(message).__name__


class Story:
    """A machine with two ranks a node. ``at`` lets one event happen, and checks all commands that follow from it."""

    def __init__(self, *, features: tuple[tuple[str, Feature], ...] = (), **rules: object) -> None:
        self.job = Job(features, **{"inspect": False, **rules})
        self.machine: JobMachine = self.job.machine
        self.nodes = {0}
        self.now = 0.0

    def joined(self, *numbers: int) -> Story:
        self.job.join(*numbers)
        self.nodes |= {*numbers}
        return self

    def at(self, seconds: float, event: MachineEvent | messages.FromNode | tuple[int, Any], *expected: str) -> None:
        """``event``, or a node's number and its message, happens at this time, and nothing is due before."""
        due = self.machine.wake_at()
        assert due is None or due >= seconds, f"a deadline is due at {due}"
        moment = Now(seconds, WALL + seconds)
        if not isinstance(event, ev.HelloReceived | ev.ConnectionLost | ev.DeadlineDue):
            event = ev.MessageReceived(*event)  # type: ignore[misc]
        if isinstance(event, ev.ConnectionLost):
            self.nodes.discard(event.node_rank)
        assert self._describe_all(self.machine.on(event, moment)) == list(expected)

    def _describe_all(self, commands: list[Command]) -> list[str]:
        """The commands in a few words; what goes to all nodes is one line."""
        receivers: dict[str, list[int]] = {}
        for command in commands:
            match command:
                case do.Send(number, message):
                    receivers.setdefault(describe(message), []).append(number)
                case do.Accept(_, hello):
                    self.nodes.add(hello.node_spec.node_rank)
                    receivers["accept"] = [hello.node_spec.node_rank]
                case do.Refuse(_, refusal):
                    receivers[f"refuse: {refusal.message}"] = []
                case do.Disconnect(number):
                    receivers["disconnect"] = [number]
        everyone = sorted(self.nodes) if len(self.nodes) > 1 else []
        return [
            f"{'all' if sorted(numbers) == everyone else ', '.join(map(str, numbers))}: {text}"
            for text, numbers in receivers.items()
        ]


def failed(
    node: int, rank: int, attempt: int = 0, at: float = 0.0, sent: float | None = None, **fields: Any
) -> tuple[int, Any]:
    """A rank has failed ``at`` this time; its node sends that then, or later."""
    values = {"exit_code": 1, "signal": None, "message": None, "traceback": None, "hint": None, **fields}
    failure = RankFailure(rank, rank % 2, f"n{node}", 1, attempt=attempt, moment=WALL + at, **values)
    return node, messages.FailureReported(attempt, failure, WALL + (at if sent is None else sent))


def reported(node: int, attempt: int = 0, at: float = 0.0, **fields: Any) -> tuple[int, Any]:
    return node, messages.AttemptReport(attempt, 0, WALL + at, **fields)


def signalled(node: int, number: int, *, again: bool = False) -> tuple[int, Any]:
    return node, messages.StopRequested(number, again)


def test_a_job_of_two_nodes_succeeds() -> None:
    story = Story(min_nodes=2).joined(1)
    story.at(1, (0, messages.RanksStarted(0)))
    story.at(1, (1, messages.RanksStarted(0)))
    story.at(60, (1, messages.RanksFinished(0)))
    story.at(60.1, reported(1))
    story.at(61, ev.DeadlineDue(), "1: note: the ranks of this node are done; waiting for node 0 (n0)")
    story.at(65, (0, messages.RanksFinished(0)))
    story.at(65.1, reported(0), "all: end, 0")


def test_several_ranks_fail_at_once() -> None:
    """The ranks are stopped once, and the first failure by one clock is the cause."""
    story = Story(min_nodes=2, grace=5.0).joined(1)
    story.at(10, failed(1, 3, at=9.9, sent=10, exit_code=7), "all: stop, SIGTERM, 5 s")
    story.at(10, failed(1, 2, at=9.95, sent=10))
    story.at(10, failed(0, 0, at=9.5, sent=10, exit_code=4))
    story.at(
        10.6,
        ev.DeadlineDue(),
        "all: note: rank 0 exited with code 4 (on n0)\n"
        "waiting up to 5 s (--grace) for the other ranks on node 0 (n0), node 1 (n1)",
    )
    story.at(11, reported(1))
    story.at(11, reported(0), "all: end, 4")


def test_a_secondary_failure_arrives_before_its_cause() -> None:
    story = Story(min_nodes=2).joined(1)
    story.at(10, failed(0, 0, at=10, message="RuntimeError: Connection closed by peer"))
    story.at(10.5, failed(1, 2, at=9.8, sent=10.5, exit_code=None, signal=9), "all: stop, SIGTERM, 30 s")
    story.at(10.6, reported(0))
    story.at(10.6, reported(1), "all: end, 137")


def test_a_crash_loop_is_given_up() -> None:
    """The wait doubles with each short attempt; the third one is the last."""
    story = Story(max_restarts=9, restart_backoff=2.0, min_uptime=5.0)
    story.at(1, failed(0, 0), "0: stop, SIGTERM, 30 s")
    story.at(1, reported(0), "0: attempt 1 follows in 2 s")
    story.at(3, ev.DeadlineDue(), "0: start attempt 1")
    story.at(4, failed(0, 1, 1), "0: stop, SIGTERM, 30 s")
    story.at(4, reported(0, 1), "0: attempt 2 follows in 4 s")
    story.at(8, ev.DeadlineDue(), "0: start attempt 2")
    story.at(9, failed(0, 0, 2), "0: stop, SIGTERM, 30 s")
    short = "giving up: 3 attempts in a row lasted less than 5 s (--min-uptime)"
    story.at(9, reported(0, 2), f"0: end, 1: {short}")


def test_a_message_of_an_earlier_attempt_changes_nothing() -> None:
    story = Story(min_nodes=2, max_restarts=1).joined(1)
    story.at(10, failed(0, 0), "all: stop, SIGTERM, 30 s")
    story.at(10, reported(0))
    story.at(10, reported(1), "all: attempt 1 follows in 0 s")
    story.at(10, ev.DeadlineDue(), "all: start attempt 1")
    for late in (failed(1, 2), reported(1), (1, messages.RanksFinished(0)), (1, messages.HoldChanged(0, True))):
        story.at(10.1, late)


def test_ctrl_c_in_the_wait_before_a_restart() -> None:
    story = Story(max_restarts=1, restart_backoff=600.0)
    story.at(10, failed(0, 0), "0: stop, SIGTERM, 30 s")
    story.at(10, reported(0), "0: attempt 1 follows in 600 s")
    story.at(11, signalled(0, signal.SIGINT), "0: end, 130")
    assert story.machine.wake_at() is None


def test_ctrl_c_once_twice_and_a_third_time() -> None:
    """Only the third does not wait for the nodes, also without a grace."""
    story = Story(min_nodes=2, grace=0.0).joined(1)
    story.at(1, signalled(0, signal.SIGINT), "1: note: Ctrl-C on node 0 (n0)", "all: stop, SIGINT, 0 s")
    story.at(2, signalled(0, signal.SIGINT, again=True), "all: stop, SIGINT, 0 s")
    story.at(3, signalled(0, signal.SIGINT, again=True), "all: end, 130")
    story.at(4, reported(1))


def test_an_elastic_job_loses_a_node_and_grows_again() -> None:
    story = Story(min_nodes=1, max_nodes=2, grow=True).joined(1)
    story.at(
        10,
        ev.ConnectionLost(1, "no heartbeat for 15.0 s", 15.0),
        "0: NodeLost",
        "0: note: node 1 (n1) was lost: no heartbeat for 15.0 s; stopping the others",
        "0: stop, SIGTERM, 30 s",
    )
    story.at(11, reported(0), "0: note: going on with 1 node: node 0 (n0)")
    story.at(11, ev.DeadlineDue(), "0: start attempt 1")
    joined = "all: note: node 1 (n1) has joined: stopping the ranks, to start again with it"
    story.at(20, ev.HelloReceived(5, story.job.hello(1)), "1: accept", joined, "0: stop, SIGTERM, 30 s")
    story.at(21, reported(0, 1), "all: note: going on with 2 nodes: node 0 (n0), node 1 (n1)")
    story.at(21, ev.DeadlineDue(), "all: start attempt 2")


AGAIN = "preempted by SIGUSR2: the same command may be run again (exit code 75)"


@pytest.mark.parametrize(("seen", "end"), [(True, f"0: end, 75: {AGAIN}"), (False, "0: end, 0")])
def test_the_preemption_notice_and_ranks_that_save_a_checkpoint_or_need_none(seen: bool, end: str) -> None:
    """Exit code 75: the same command may run again, as by a scheduler that requeues the job."""
    story = Story(preempt_grace=20.0)
    text = "preempted by SIGUSR2: ranks have 20 s (--preempt-grace) to save a checkpoint"
    story.at(5, (0, messages.PreemptionNotice(signal.SIGUSR2)), f"0: note: {text}", "0: PreemptRanks")
    story.at(9, (0, messages.RanksFinished(0)))
    story.at(9, reported(0, preemption_seen=seen), end)


def test_a_suspension_of_node_0_adds_one_step_to_the_wait_for_a_report() -> None:
    """A laptop that sleeps while ranks are being stopped: a node that is late by that is not lost."""
    story = Story(min_nodes=2, grace=5.0).joined(1)
    story.at(0, signalled(0, signal.SIGTERM), "1: note: SIGTERM on node 0 (n0)", "all: stop, SIGTERM, 5 s")
    story.at(1, reported(0))
    story.at(5, ev.DeadlineDue())
    story.machine.on(ev.DeadlineDue(), Now(1000, WALL + 1000))
    for seconds in range(1005, 1025, 5):
        story.at(seconds, ev.DeadlineDue())
    why = "node 1 (n1) was lost: it did not report the end of its ranks within 35 s"
    story.nodes.discard(1)
    story.at(1025, ev.DeadlineDue(), "1: disconnect", "0: NodeLost", f"0: note: {why}", "0: end, 143")


class Raising(Feature, JobSide):
    """A feature whose deadline handler raises."""

    def make_job_side(self, context: JobContext) -> JobSide:
        context.set_deadline("bug", 5.0)
        return self

    def on_deadline(self, name: str) -> None:
        raise ValueError(name)


def test_a_feature_that_raises_costs_one_note() -> None:
    story = Story(features=(("raising", Raising()),))
    assert story.machine.wake_at() == 5.0
    (note,) = story.machine.on(ev.DeadlineDue(), Now(5.0, WALL))
    assert isinstance(note, do.Send)
    assert describe(note.message).startswith("note: bug in ddplaunch: the feature raising failed and is left out")
    story.at(9, (0, messages.RanksFinished(0)))
    story.at(9, reported(0), "0: end, 0")
