"""Tests of the job sides of features: what the coordinator asks of them, and what one that raises costs."""

from __future__ import annotations

from ddplaunch.core import messages
from ddplaunch.core.feature import Feature, JobContext, JobSide
from tests.core.job.test_coordinator import Job


class RaisingSide(JobSide):
    def before_start(self, attempt: int) -> messages.CheckNode:
        raise ValueError(f"attempt {attempt}")


class Raising(Feature):
    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    def make_job_side(self, context: JobContext) -> JobSide:
        if self._at_once:
            raise ValueError("no side")
        return RaisingSide()


def bugs(job: Job) -> list[str]:
    """The notes on bugs: their first lines."""
    notes = [each.text for each in job.take(messages.NoteMessage) if isinstance(each, messages.NoteMessage)]
    return [text.partition(";")[0] for text in notes if "bug" in text]


def test_a_side_that_raises_is_reported_once_and_the_job_goes_on():
    features = (("first", Raising(at_once=True)), ("second", Raising(at_once=False)))
    job = Job(features=features, max_restarts=1)
    assert bugs(job) == [
        f"bug in ddplaunch: the feature {name} failed and is left out, the job goes on" for name in ("first", "second")
    ]
    assert len(job.take(messages.StartAttempt)) == 1
    job.drain(0, job.fail(0, 0))
    job.wait(0)
    assert len(job.take(messages.StartAttempt)) == 1
    assert bugs(job) == []


def test_without_features_nothing_precedes_the_start():
    job = Job(features=(), checks_nodes=True)
    assert not job.take(messages.CheckNode)
    assert job.take(messages.StartAttempt)
