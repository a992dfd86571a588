"""Time limits, as the coordinator of a job without processes keeps them."""

from __future__ import annotations

import signal

from ddplaunch.control import messages
from ddplaunch.control.attempt import JobAttempt
from ddplaunch.control.failure import Failure, Outcome
from ddplaunch.control.time_limits import Cut
from tests.control.test_coordinator import Job


def test_the_time_of_a_job_is_over():
    job = Job(timeout=60.0)
    job.wait(59)
    assert not job.take(messages.Stop)
    job.wait(1)
    assert job.take(messages.Note) == [messages.Note("1m00s have passed (--timeout): stopping the ranks")]
    assert job.take(messages.Stop) == [messages.Stop(0, signal.SIGTERM, 30.0)]
    job.drain(0, stopped=2)
    assert job.outcome(0).outcome == Outcome(124, remark="1m00s have passed (--timeout)")


def test_it_counts_from_the_start_of_the_first_rank():
    """Not from the import of torch, nor anew after a restart; where no rank ever starts it is over, too."""
    job = Job(timeout=60.0, max_restarts=1)
    job.wait(50)
    job.say(0, messages.RanksStarted(0))
    job.wait(20)
    job.drain(0, job.fail(0, 1))
    job.say(0, messages.RanksStarted(1))
    job.wait(39)
    assert job.take(messages.Stop, 0)[-1].attempt == 0
    job.wait(1)
    assert job.take(messages.Stop, 0)[-1] == messages.Stop(1, signal.SIGTERM, 30.0)


def test_only_others_are_other_ranks_that_were_stopped():
    """Rank 0's program had ended, but its process had not: the others needed its store."""
    failure = Failure(0, 0, "n0", 4711, 0, 124, None, "the job stalled", None, 0.0, None)
    attempt = JobAttempt(0, world_size=2, stopped=2, cut=Cut("no progress", failure, lives=False))
    assert attempt.verdict
    assert attempt.verdict.stopped == 1


def test_it_runs_on_over_restarts():
    job = Job(timeout=60.0, max_restarts=9)
    job.wait(50)
    job.drain(0, job.fail(0, 1))
    job.wait(9)
    assert len(job.take(messages.Start)) == 2
    job.wait(1)
    assert job.take(messages.Stop, 0)[-1] == messages.Stop(1, signal.SIGTERM, 30.0)
    job.drain(0, attempt=1, stopped=2)
    assert job.outcome(0).outcome.code == 124


def test_it_ends_while_a_restart_waits():
    job = Job(timeout=60.0, max_restarts=9, restart_backoff=50.0)
    job.wait(30)
    job.drain(0, job.fail(0, 1))
    job.wait(30)
    assert job.outcome(0).outcome == Outcome(124, remark="1m00s have passed (--timeout)")


def test_no_restart_follows_it():
    """A rank had failed, and the others were being stopped."""
    job = Job(timeout=60.0, max_restarts=9)
    job.wait(55)
    failure = job.fail(0, 1)
    job.wait(10)
    job.drain(0, failure, stopped=1)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.remark) == (3, "no restart: the time of the job is over (--timeout)")


def test_a_job_that_ends_in_time():
    job = Job(timeout=60.0)
    job.say(0, messages.Finished(0))
    job.drain(0)
    assert job.outcome(0).outcome == Outcome(0)
    job.wait(100)
    assert not job.take(messages.End)


def test_all_nodes_may_suspect_a_stall_at_once():
    """They are asked once for all of them, and once more for those that come late."""
    job = Job(min_nodes=8, max_nodes=8)
    job.join(*range(1, 8))
    for number in range(8):
        job.say(number, messages.Suspicion(0))
    assert len(job.take(messages.Inspect)) == 8
    job.wait(3)  # nobody answers
    job.wait(29)
    assert not job.take(messages.Inspect)
    job.wait(1)
    assert len(job.take(messages.Inspect)) == 8
    job.wait(600)
    assert not job.take(messages.Inspect)
