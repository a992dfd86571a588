"""Tests of the coordinator's time limits, without processes."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.base.options import Options
from ddplaunch.base.stack_frames import Frame
from ddplaunch.core import messages
from ddplaunch.core.failures import JobResult, RankFailure
from ddplaunch.core.job.job_attempt import JobAttempt, StopCause
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals, Detail, Inspection, Thread
from ddplaunch.observe.job.stall_limit import STALL_CHECK_INTERVAL_S
from ddplaunch.observe.messages import StallSuspected, StragglersFound
from ddplaunch.observe.options import Hangs
from tests.core.job.job_steps import Job, joined
from tests.observe.diagnosis.test_stall import rank


def test_timeout_stops_the_ranks():
    job = Job(timeout=60.0)
    job.wait(59)
    assert not job.take(messages.StopAttempt)
    job.wait(1)
    assert job.take(messages.NoteMessage) == [messages.NoteMessage("--timeout (1m00s) expired: stopping the ranks")]
    assert job.take(messages.StopAttempt) == [messages.StopAttempt(0, signal.SIGTERM, 30.0)]
    job.drain(0, stopped=2)
    assert job.outcome(0).outcome == JobResult(124, remark="--timeout (1m00s) expired")


def test_timeout_counts_from_the_start_of_the_first_rank():
    """The import of torch does not count, a restart does not reset it, and it also expires if no rank ever starts."""
    job = Job(timeout=60.0, max_restarts=1)
    job.wait(50)
    job.send(0, messages.RanksStarted(0))
    job.wait(20)
    job.drain(0, job.fail(0, 1))
    job.send(0, messages.RanksStarted(1))
    job.wait(39)
    assert job.take(messages.StopAttempt, 0)[-1].attempt == 0
    job.wait(1)
    assert job.take(messages.StopAttempt, 0)[-1] == messages.StopAttempt(1, signal.SIGTERM, 30.0)


def test_timeout_is_paused_while_a_rank_is_in_a_debugger():
    job = Job(timeout=60.0)
    job.wait(50)
    job.send(0, messages.HoldChanged(0, True))
    job.wait(1000)
    job.send(0, messages.HoldChanged(0, False))
    job.wait(9)
    assert not job.take(messages.StopAttempt)
    job.wait(1)
    assert job.take(messages.StopAttempt) == [messages.StopAttempt(0, signal.SIGTERM, 30.0)]


def test_a_lost_node_does_not_pause_the_timeout():
    """A rank of the lost node was in a debugger."""
    job = joined(1, timeout=60.0, min_nodes=2, max_nodes=2, spares=0)
    job.send(1, messages.HoldChanged(0, True))
    job.send(0, messages.StopRequested(signal.SIGINT))
    job.take(messages.ProgressResumed)
    job.lose(1)
    assert len(job.take(messages.ProgressResumed)) == 1


def test_no_time_limit_shortens_the_grace_of_a_preemption():
    job = Job(timeout=60.0, preempt_grace=50.0)
    job.wait(40)
    job.send(0, messages.PreemptionNotice(signal.SIGUSR1))
    job.wait(49.9)
    assert not job.take(messages.StopAttempt)
    job.take(messages.NoteMessage)
    job.wait(0.1)
    assert [note.text for note in job.take(messages.NoteMessage)] == [
        "--preempt-grace (50 s) expired: stopping the ranks"
    ]
    assert job.take(messages.StopAttempt)


NO_PROGRESS = RankFailure(0, 0, "n0", 4711, 0, 124, None, "the job stalled", None, 0.0, None)
"""The failure of the rank that the others waited for."""


def test_the_stalled_rank_does_not_count_as_another_stopped_rank():
    limit = StopCause("no progress", NO_PROGRESS, rank_was_alive=False)
    report = JobAttempt(0, world_size=2, stopped_ranks=2, stop_cause=limit).failure_report
    assert report
    assert report.stopped == 1


@pytest.mark.parametrize(("world_size", "alive", "stopped"), [(8, True, 2), (8, False, 3), (5, True, 1)])
def test_a_rank_that_loses_a_connection_to_a_stopped_rank_was_stopped(world_size, alive, stopped):
    """Ranks that raise in their cleanup, time out, or failed before the stop are failures; the others were stopped."""
    lost = replace(NO_PROGRESS, rank=1, exit_code=1, message="RuntimeError: Connection closed by peer")
    raised = replace(lost, rank=2, message="OSError: No space left on device")
    waited = replace(lost, rank=3, message="RuntimeError: Timed out waiting 10000ms for recv operation to complete")
    earlier = replace(lost, rank=4, moment=NO_PROGRESS.moment - 0.5)
    limit = StopCause("no progress", NO_PROGRESS, rank_was_alive=alive)
    failures = {each.rank: each for each in (lost, raised, waited, earlier)}
    report = JobAttempt(0, world_size=world_size, stopped_ranks=2, stop_cause=limit, failures=failures).failure_report
    assert report
    assert (report.others, report.stopped) == ((raised, waited, earlier), stopped)


def test_timeout_expires_during_the_restart_backoff():
    job = Job(timeout=60.0, max_restarts=9, restart_backoff=50.0)
    job.wait(30)
    job.send(0, messages.HoldChanged(0, True))  # no user continues a rank that has ended
    job.drain(0, job.fail(0, 1))
    job.wait(30)
    assert job.outcome(0).outcome == JobResult(124, remark="--timeout (1m00s) expired")


def test_no_restart_after_the_timeout():
    job = Job(timeout=60.0, max_restarts=9)
    job.wait(55)
    failure = job.fail(0, 1)
    job.wait(10)
    job.drain(0, failure, stopped=1)
    outcome = job.outcome(0).outcome
    assert (outcome.code, outcome.remark) == (3, "no restart: --timeout has expired")


def test_stalls_suspected_by_all_nodes_are_one_inspection():
    """Suspicions of all nodes cause one inspection, and later ones a second."""
    job = joined(*range(1, 8), min_nodes=8, max_nodes=8)
    for number in range(8):
        job.send(number, StallSuspected(0))
    assert len(job.take(messages.RpcRequest)) == 8
    job.wait(3 + STALL_CHECK_INTERVAL_S)  # no node replies
    assert len(job.take(messages.RpcRequest)) == 8
    job.wait(600)
    assert not job.take(messages.RpcRequest)


def test_stragglers_are_looked_for_once_a_second_while_a_rank_waits_for_a_user():
    job = Job()
    job.send(0, messages.HoldChanged(0, True))
    job.send(0, StragglersFound(0))
    for serial in (1, 2, 3):
        assert [each.serial for each in job.take(messages.RpcRequest)] == [serial]
        job.send(0, messages.RpcReply(serial, "inspect", Inspection(0.0, (), 2)))
        job.wait(0.9)
        assert not job.take(messages.RpcRequest)
        job.wait(0.1)


class Waiting:
    """A job of two ranks, of which rank 0 waits; a test says for how long, and what the job's usual gap is."""

    def __init__(self, **hangs: Any) -> None:
        self.job, self.gap, self.steps = Job(options=Options({Hangs: Hangs(**hangs)}, {})), 0.1, 0
        self.quiet: float | None = None  # seconds since a rank printed; None: as long as they wait
        self.busy: dict[str, Any] = {}  # fields of rank 1

    def suspect(self, seconds: float) -> list[str]:
        """A node's word after this much silence, at another collective than before; return the notes."""
        self.steps += 1
        self.job.wait(STALL_CHECK_INTERVAL_S)
        self.job.send(0, StallSuspected(0))
        return self.answer(seconds)

    def answer(self, seconds: float) -> list[str]:
        self.inspected(seconds)
        found = self.job.take(messages.JobStalled)
        return [each.text for each in found if isinstance(each, messages.JobStalled) and each.text]

    def inspected(self, seconds: float) -> None:
        """Answer all requests as ranks that have made no progress for this time."""
        shares = {"quiet": self.quiet or seconds, "standstill": seconds}
        of_1 = {**shares, **self.busy}
        ranks = [rank(0, 4 + self.steps, 3 + self.steps, **shares), rank(1, 3 + self.steps, 3 + self.steps, **of_1)]
        arrivals = CollectiveArrivals(0, "0", "default_pg", 1, 0.0, (10, 20, round(self.gap * 1e6)) * 20)
        while asked := self.job.take(messages.RpcRequest):
            (question,) = asked
            assert isinstance(question, messages.RpcRequest)
            if question.payload is Detail.LATENESS:
                ranks[0] = replace(ranks[0], arrivals=(arrivals,))
            self.job.send(0, messages.RpcReply(question.serial, "inspect", Inspection(0.0, tuple(ranks), 2)))


def test_a_stall_is_reported_once():
    waiting = Waiting()
    (found,) = waiting.suspect(24.0)
    assert found.startswith("no progress for 24s: rank 0 waits in all_reduce #5 of default_pg")
    assert "for details: ddplaunch stacks id" in found
    waiting.steps -= 1
    assert not waiting.suspect(300.0), "once"


def test_a_stall_is_ten_times_the_usual_gap():
    waiting = Waiting()
    waiting.gap = 5.0
    assert not waiting.suspect(24.0)
    waiting.job.wait(25.9)
    assert not waiting.job.take(messages.RpcRequest)
    waiting.job.wait(0.1)
    (found,) = waiting.answer(50.0)
    assert found.startswith("no progress for 50s: ")


def test_a_long_wait_that_ended_raises_the_threshold_at_its_place():
    """A wait at the same location is reported once it lasts three times as long: checkpoints repeat."""
    waiting = Waiting()
    assert waiting.suspect(24.0)
    assert not waiting.suspect(24.0)
    assert not waiting.suspect(44.0)
    assert waiting.suspect(84.0)
    assert not waiting.suspect(164.0)
    assert waiting.suspect(300.0), "as without a bar"


def test_a_stall_is_noted_before_the_stall_timeout():
    waiting = Waiting(stall_timeout=60.0, on_stall="stop")
    assert waiting.suspect(24.0)
    assert not waiting.job.take(messages.StopAttempt)
    assert waiting.suspect(60.0) == []
    assert waiting.job.take(messages.StopAttempt)


def test_all_nodes_are_notified_of_a_stall_and_of_its_end():
    """Node 0 sends each of both once, however many nodes report progress."""
    waiting = Waiting()
    waiting.job.send(0, messages.ProgressResumed(0))
    assert not waiting.job.take(messages.ProgressResumed), "it had not stalled"
    assert waiting.suspect(24.0)
    for _ in range(2):
        waiting.job.send(0, messages.ProgressResumed(0))
    assert waiting.job.take(messages.ProgressResumed) == [messages.ProgressResumed(0)]


def test_a_rank_that_only_prints_ends_no_stall():
    """Node 0 sends the stall again with its first moment, and without a text."""
    waiting = Waiting()
    assert waiting.suspect(24.0)
    for seconds in (70.0, 330.0):  # as announced early, and after the stall timeout
        waiting.job.send(0, messages.ProgressResumed(0))
        waiting.job.take(messages.JobStalled)
        waiting.job.wait(STALL_CHECK_INTERVAL_S)
        waiting.job.send(0, StallSuspected(0))
        waiting.inspected(seconds)
        (stalled,) = waiting.job.take(messages.JobStalled)
        assert (stalled.text, round(time.time() - stalled.since)) == ("", seconds)


def test_a_long_wait_is_announced_although_a_rank_prints():
    """It is reported after 10 minutes, and no stall timeout stops the job."""
    waiting = Waiting(stall_timeout=30.0, on_stall="stop")
    waiting.quiet = 1.0
    assert not waiting.suspect(299.0)
    assert not waiting.suspect(400.0)
    waiting.job.wait(200.0)
    (found,) = waiting.answer(600.0)
    assert found.startswith("no progress for 10m00s: rank 0 waits in all_reduce #6 of default_pg")
    assert not waiting.job.take(messages.StopAttempt)


def loops(waiting: Waiting, minutes: int, **fields: Any) -> list[str]:
    """Have rank 1 compute for some minutes, while rank 0 waits for it; return the notes."""
    waiting.busy = {"busy": 1.0, **fields}
    waiting.job.take(messages.NoteMessage)
    waiting.job.send(0, StallSuspected(0))
    for _ in range(24 * minutes):
        waiting.inspected(60.0)
        waiting.job.wait(2.5)
    waiting.inspected(60.0)
    return [each.text for each in waiting.job.take(messages.NoteMessage)]


def test_a_rank_that_loops_is_named_after_five_minutes():
    waiting = Waiting(stall_timeout=30.0, on_stall="stop")
    assert not loops(waiting, 4)
    waiting.job.wait(60)
    assert loops(waiting, 6) == [
        "rank 1 has been at data.py:31 for 5 min, while rank 0 waits for it in all_reduce #4 of default_pg; "
        "for details: ddplaunch stacks id"
    ]
    assert not waiting.job.take(messages.StopAttempt), "it may be a long evaluation"
    waiting.steps += 1
    assert not loops(waiting, 14), "it repeats"
    assert len(loops(waiting, 9)) == 1


def test_a_rank_that_loops_is_named_after_ten_usual_steps():
    waiting = Waiting()
    waiting.gap = 60.0
    assert not loops(waiting, 9)
    assert "has been at data.py:31 for 1" in loops(waiting, 3)[0]


def test_a_rank_that_is_elsewhere_each_time_is_not_named():
    waiting = Waiting()
    for line in range(10, 400, 15):
        assert not loops(waiting, 1, threads=(Thread((Frame("evaluate", "eval.py", line, own=True),)),))


def test_time_at_a_breakpoint_is_stalled_time():
    """Output of other ranks does not end the stall."""
    job = Job()
    job.send(0, messages.HoldChanged(0, is_holding=True))
    (stalled,) = job.take(messages.JobStalled)
    assert isinstance(stalled, messages.JobStalled)
    assert stalled.text == ""
    job.send(0, messages.ProgressResumed(0))
    assert not job.take(messages.ProgressResumed)
    job.send(0, messages.HoldChanged(0, is_holding=False))
    assert job.take(messages.ProgressResumed) == [messages.ProgressResumed(0)]
