"""Tests of the job sides of features: what the coordinator asks of them, and what one that raises costs."""

from __future__ import annotations

import signal

import pytest

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core import messages
from ddplaunch.core.failures import FailureReport, JobResult, RankFailure
from ddplaunch.core.feature import Feature, JobContext, JobSide, RpcCall
from ddplaunch.core.job.job_attempt import JobAttempt, StopCause
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.features.check.messages import CheckNode
from ddplaunch.observe.diagnosis.inspection import Detail
from ddplaunch.observe.rpc import InspectKind
from tests.core.job.job_steps import CHECKED, Job
from tests.core.job.job_world import World, finished, reported


class RaisingSide(JobSide):
    def before_start(self, attempt: int) -> CheckNode:
        raise ValueError(f"attempt {attempt}")


class Made(Feature):
    """A feature with the job side that a test has made."""

    def __init__(self, side: JobSide) -> None:
        self._side = side

    def make_job_side(self, context: JobContext) -> JobSide:
        return self._side


class Raising(Feature):
    def make_job_side(self, context: JobContext) -> JobSide:
        raise ValueError("no side")


def bugs(job: Job) -> list[str]:
    """The notes on bugs: their first lines."""
    notes = [each.text for each in job.take(messages.NoteMessage) if isinstance(each, messages.NoteMessage)]
    return [text.partition(":\n")[0] for text in notes if "bug" in text]


def test_a_side_that_raises_is_reported_once_and_the_job_goes_on():
    features = (("first", Raising()), ("second", Made(RaisingSide())))
    job = Job(features=features, max_restarts=1)
    assert bugs(job) == [
        f"bug in ddplaunch: the feature {name} failed and is left out, the job continues"
        for name in ("first", "second")
    ]
    assert len(job.take(messages.StartAttempt)) == 1
    job.drain(0, job.fail(0, 0))
    job.wait(0)
    assert len(job.take(messages.StartAttempt)) == 1
    assert bugs(job) == []


class Before(JobSide):
    """A side that sends a request of this kind before ranks are stopped, and raises at the reply."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def before_stop(self, attempt: JobAttempt) -> RpcCall:
        return RpcCall(self._kind, None, 1.0)

    def on_stop_reply(self, reply: object) -> None:
        raise ValueError("the reply")


@pytest.mark.parametrize("kind", ["inspect", "no such kind"])
def test_a_side_that_raises_does_not_keep_ranks_from_being_stopped(kind):
    job = Job(features=(("before", Made(Before(kind))),))
    failure = job.fail(0, 0)
    job.wait(1)
    assert len(job.take(messages.StopAttempt)) == 1
    assert len(bugs(job)) == 1
    job.drain(0, failure, stopped=1)
    assert job.outcome(0).outcome.code == 3


class Insistent(JobSide):
    """A side that returns a request each time that it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def before_stop(self, attempt: JobAttempt) -> RpcCall:
        self.calls += 1
        return RpcCall("inspect", Detail.WAITS, 1.0)


@pytest.mark.parametrize("raises", [False, True])
def test_a_side_sends_one_request_before_a_stop(raises, monkeypatch):
    if raises:
        monkeypatch.setattr(InspectKind, "merge", lambda *arguments: 1 / 0)
    side = Insistent()
    job = Job(features=(("insistent", Made(side)),))
    job.fail(0, 0)
    for _ in range(3):
        job.wait(1)
    assert len(job.take(messages.StopAttempt)) == 1
    assert side.calls == 2  # at the failure, and after the reply


def test_no_request_precedes_a_stop_that_changes_nodes():
    side = Insistent()
    job = Job(features=(("insistent", Made(side)),), min_nodes=1, max_nodes=2)
    job.join(1)
    job.send(1, messages.StopRequested(signal.SIGTERM))
    assert len(job.take(messages.StopAttempt)) == 2
    assert side.calls == 0


class Recording(JobSide):
    """A side that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_attempt_start(self, attempt: int) -> None:
        self.calls.append(f"start {attempt}")

    def blame(self, report: FailureReport, failures: object) -> FailureReport:
        self.calls.append(f"blame {report.first.rank}")
        return report

    def on_job_end(self, result: JobResult) -> None:
        self.calls.append(f"end {result.code}")


def test_the_calls_of_a_side():
    """Only a failure that follows from another is explained; the job fails with it also if nothing else does."""
    side = Recording()
    job = Job(features=(("recording", Made(side)),), max_restarts=1)
    for attempt, text in enumerate(("ValueError: boom", "RuntimeError: Connection closed by peer")):
        job.drain(0, job.fail(0, attempt, attempt, message=text), attempt=attempt)
        job.wait(0)
    assert side.calls == ["start 0", "start 1", "blame 1", "end 3"]


class WithContext(Feature, JobSide):
    """A feature that is its own job side."""

    def make_job_side(self, context: JobContext) -> JobSide:
        self._context = context
        return self


class Stopping(WithContext):
    """A feature whose time limit expires with the first message."""

    def on_message(self, node: int, message: messages.FromNode) -> None:
        self._context.stop_attempt(StopCause("too long", None))


def test_a_bug_of_the_core_is_not_that_of_the_side_that_stops_the_ranks(monkeypatch):
    monkeypatch.setattr(JobMachine, "_stop_ranks", lambda *arguments: 1 / 0)
    job = Job(features=(("stopping", Stopping()),))
    with pytest.raises(ZeroDivisionError):
        job.send(0, messages.RanksStarted(0))
    assert bugs(job) == []


def test_a_side_that_stops_the_ranks_too_late_does_not_prevent_the_restart():
    job = Job(features=(("stopping", Stopping()),), max_restarts=1, restart_backoff=5.0)
    job.drain(0, job.fail(0, 0))
    assert not job.take(messages.EndJob)
    job.wait(5)
    assert [start.attempt for start in job.take(messages.StartAttempt)] == [0, 1]


class Late(WithContext):
    """A feature that sets a deadline with each message, also with the one that ends the job."""

    def on_message(self, node: int, message: messages.FromNode) -> None:
        if isinstance(message, messages.RanksStarted):
            self._context.cancel_deadlines("late")
        else:
            self._context.set_deadline("late", 1.0)


def test_after_the_end_no_side_is_called_and_no_deadline_is_left():
    job = Job(features=(("late", Late()),))
    job.send(0, messages.RanksFinished(0))
    assert job.machine.wake_at() == 1.0
    job.send(0, messages.RanksStarted(0))
    assert job.machine.wake_at() != 1.0
    job.drain(0)
    assert job.outcome(0).outcome.code == 0
    assert job.machine.wake_at() is None


class Strict(JobSide):
    """A side that refuses every message, and raises when it explains a failure."""

    def on_message(self, node: int, message: messages.FromNode) -> None:
        raise ProtocolError(f"a message of node {node}")

    def blame(self, report: FailureReport, failures: object) -> FailureReport:
        raise ValueError("the report")

    def on_job_end(self, result: JobResult) -> None:
        raise ValueError("the end")


def test_a_message_that_a_side_refuses_is_the_fault_of_the_node():
    job = Job(features=(("strict", Made(Strict())),))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="a message of node 0"):
            job.send(0, messages.RanksStarted(0))
    assert bugs(job) == []


def test_an_explanation_that_fails_leaves_the_report():
    class Explaining(Strict):
        def on_message(self, node: int, message: messages.FromNode) -> None:
            pass

    job = Job(features=(("explaining", Made(Explaining())),))
    failure: RankFailure = job.fail(0, 0, message="RuntimeError: Connection closed by peer")
    job.drain(0, failure, stopped=1)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.verdict and outcome.verdict.first.rank) == (3, 0)
    assert len(bugs(job)) == 1


def test_without_features_nothing_precedes_start_and_stop_and_the_report_blames_no_rank():
    job = Job(features=(), inspect=True, options=CHECKED)
    assert not job.take(CheckNode)
    assert job.take(messages.StartAttempt)
    failure = job.fail(0, 0, message="RuntimeError: Connection closed by peer")
    job.wait(1)
    assert not job.take(messages.RpcRequest)
    assert len(job.take(messages.StopAttempt)) == 1
    job.drain(0, failure, stopped=1)
    outcome = job.outcome(0).outcome
    assert outcome.verdict
    assert (outcome.verdict.first, outcome.verdict.blame) == (failure, None)


def test_where_the_inspection_itself_raises_ranks_are_stopped_as_without_it(monkeypatch):
    monkeypatch.setattr(InspectKind, "merge", lambda *arguments: 1 / 0)
    job = Job(inspect=True)
    failure = job.fail(0, 0, message="RuntimeError: Connection closed by peer")
    job.wait(1)
    assert bugs(job) == ["bug in ddplaunch: the request inspect failed and is left out, the job continues"]
    assert len(job.take(messages.StopAttempt)) == 1
    job.drain(0, failure, stopped=1)
    outcome = job.outcome(0).outcome
    assert outcome.verdict
    assert outcome.verdict.first == failure


class RaisingLater(WithContext):
    """A feature whose deadline handler raises."""

    def make_job_side(self, context: JobContext) -> JobSide:
        context.set_deadline("bug", 5.0)
        return self

    def on_deadline(self, name: str) -> None:
        raise ValueError(name)


def test_a_feature_that_raises_costs_one_note() -> None:
    world = World(features=(("raising", RaisingLater()),))
    (note,) = world.play(5, None)
    assert note.startswith("0: note: bug in ddplaunch: the feature raising failed and is left out")
    world.at(9, finished(0))
    world.at(9, reported(0), "0: end, 0")
