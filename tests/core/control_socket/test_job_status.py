"""Tests of the status of a job, folded from its events."""

import random
import signal
import time

import pytest

from ddplaunch.core import events
from ddplaunch.core.control_socket.job_status import MAX_PENDING_EVENTS, JobState, RankState, Status, StatusTracker
from ddplaunch.features.programs.sidecars import SidecarExited
from tests.features.runs.recorded_events import plan
from tests.scaled_timeouts import scaled_timeout

PLAN = plan(ranks=3)


def folded(*happened: events.Event) -> Status:
    status = Status.from_plan(PLAN, 1, 0.0)
    for moment, event in enumerate(happened):
        status = status.apply(event, float(moment))
    return status


PLANNED = events.AttemptPlanned(PLAN, 0)
STARTED = tuple(events.RankStarted(rank, 100 + rank, 0) for rank in range(3))


def test_the_status_before_any_event():
    status = StatusTracker(PLAN).status()
    assert (status.state, status.attempt, status.run_id, status.target) == (JobState.JOINING, -1, "r", "sleep 600")
    assert status.ranks == ()


def test_events_are_folded_on_request():
    watch = StatusTracker(PLAN)
    watch.observe(PLANNED)
    for event in STARTED:
        watch.observe(event)
    assert watch.status().state is JobState.RUNNING
    for _ in range(3 * MAX_PENDING_EVENTS):
        watch.observe(events.NoteAdded("x"))
    watch.observe(events.JobEnded(0, None))
    assert watch.status().state is JobState.ENDED


def test_a_thousand_ranks_cost_little_time():
    many = plan(ranks=1000)
    watch = StatusTracker(many)
    watch.observe(events.AttemptPlanned(many, 0))
    for rank in range(1000):
        watch.observe(events.RankStarted(rank, 1, 0))
    began = time.process_time()
    assert watch.status().state is JobState.RUNNING
    assert time.process_time() - began < scaled_timeout(0.5)


@pytest.mark.parametrize(
    ("happened", "state", "since"),
    [
        ((), JobState.STARTING, 0),
        (STARTED[:2], JobState.STARTING, 0),
        (STARTED, JobState.RUNNING, 3),
        ((*STARTED, events.RankExited(1, 101, 0, 0)), JobState.RUNNING, 3),
        ((*STARTED, events.RankExited(1, 101, -9, 0)), JobState.STOPPING, 4),
        ((events.RankStartFailed(0, 11, 0),), JobState.STOPPING, 1),
        ((*STARTED, events.SignalReceived(signal.SIGINT), events.SignalReceived(signal.SIGINT)), JobState.STOPPING, 4),
        ((*STARTED, events.SignalReceived(signal.SIGUSR2), events.JobPreempted()), JobState.PREEMPTED, 5),
        ((*STARTED, events.JobPreempted(), events.RankExited(1, 101, 75, 0)), JobState.PREEMPTED, 4),
        ((*STARTED, events.AttemptSwept((), ())), JobState.SWEPT, 4),
        ((*STARTED, events.AttemptSwept((), ()), events.JobEnded(3, None)), JobState.ENDED, 5),
        ((events.JobEnded(2, None), PLANNED), JobState.ENDED, 1),
    ],
    ids=lambda value: value.name if isinstance(value, JobState) else None,
)
def test_the_state_of_the_job_follows_its_events(happened, state, since):
    status = folded(PLANNED, *happened)
    assert (status.state, status.since) == (state, since)


def test_the_status_has_the_state_of_each_rank():
    status = folded(PLANNED, *STARTED[:2], events.RankExited(1, 101, 4, 0))
    assert [(each.pid, each.state, each.code) for each in status.ranks] == [
        (100, RankState.RUNNING, None),
        (101, RankState.EXITED, 4),
        (0, RankState.PENDING, None),
    ]


def test_an_exit_that_arrives_after_the_sweep():
    status = folded(PLANNED, *STARTED, events.AttemptSwept((), ()), events.RankExited(1, 101, -9, 0))
    assert [each.state for each in status.ranks] == [RankState.EXITED] * 3
    assert [each.code for each in status.ranks] == [None, -9, None]


def test_a_rank_of_the_attempt_before_changes_nothing():
    again = events.AttemptSwept((), ()), events.AttemptPlanned(PLAN, 1)
    assert folded(PLANNED, *STARTED, *again, events.RankExited(0, 100, -9, 0)).ranks == folded(again[1]).ranks


def test_programs_of_the_attempt_before_are_not_ready():
    """On a node without ranks; a sidecar that has ended does not start again, and nothing waits for it."""
    names = {"a": "service", "b": "service", "bar": "sidecar"}
    planned = tuple(events.ProgramPlanned(name, kind, "", "") for name, kind in names.items())
    begin = events.ProgramsStarting(0, has_ranks=False)
    ready = tuple(events.ProgramReady(name, 1.0, 0) for name in names)
    ended = tuple(events.ProgramExited(name, 0, 0) for name in names)
    first = folded(begin, *planned, *ready)
    assert first.state is JobState.RUNNING
    end = (*ended, events.AttemptSwept((), ()), events.Restarting(1, 0.0, "again", None))
    second = folded(begin, *planned, *ready, *end, events.ProgramsStarting(1, has_ranks=False), ready[0])
    assert second.state is JobState.STARTING
    assert [each.state for each in second.programs] == ["ready", "waiting", "ended"]
    assert second.apply(ready[1], 30.0).state is JobState.RUNNING


def test_any_order_of_events_gives_a_status():
    """An observer may raise nothing. What is certain: between two attempts is a sweep."""
    chance = random.Random(1)
    for _ in range(100):
        attempt, swept, status = -1, True, Status.from_plan(PLAN, 1, 0.0)
        for moment in range(40):
            rank = chance.randrange(4)
            event = chance.choice(
                [
                    *[events.AttemptPlanned(PLAN, attempt + 1)] * swept,
                    *[events.RankStarted(rank, 100 + rank, attempt)] * 3,
                    events.RankStartFailed(rank, 11, attempt),
                    events.RankExited(rank, 100 + rank, chance.choice([0, 1, -9]), attempt),
                    events.SignalReceived(15),
                    events.JobPreempted(),
                    events.AttemptSwept((), ()),
                    events.Restarting(attempt + 1, 0.0, "", None),
                    events.NoteAdded("x"),
                    SidecarExited("x", 0),
                ]
            )
            if isinstance(event, events.AttemptPlanned):
                attempt, swept = event.attempt, False
            swept = swept or isinstance(event, events.AttemptSwept)
            status = status.apply(event, float(moment))
        assert status.apply(events.JobEnded(0, None), 99.0).code == 0
