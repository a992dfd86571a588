"""The status of a job, folded from its events."""

import random
import signal
import time

import pytest

from ddplaunch.job.status import RankState, State, Status
from ddplaunch.job.watch import MAX_NEWS, Watch
from ddplaunch.output import events
from tests.job.samples import plan
from tests.patience import patience

PLAN = plan(ranks=3)


def folded(*happened: events.Event) -> Status:
    status = Status.of(PLAN, 1, 0.0)
    for moment, event in enumerate(happened):
        status = status.after(event, float(moment))
    return status


PLANNED = events.Planned(PLAN, 0)
STARTED = tuple(events.Started(rank, 100 + rank, 0) for rank in range(3))


def test_the_beginning():
    status = Watch(PLAN).status()
    assert (status.state, status.attempt, status.run_id, status.target) == (State.JOINING, -1, "r", "sleep 600")
    assert status.ranks == ()


def test_what_is_noted_is_folded_when_somebody_asks_or_there_is_too_much():
    watch = Watch(PLAN)
    watch.observe(PLANNED)
    for event in STARTED:
        watch.observe(event)
    assert watch.status().state is State.RUNNING
    for _ in range(3 * MAX_NEWS):
        watch.observe(events.Noted("x"))
    watch.observe(events.Ended(0, None))
    assert watch.status().state is State.ENDED


def test_a_thousand_ranks_are_no_burden():
    many = plan(ranks=1000)
    watch = Watch(many)
    watch.observe(events.Planned(many, 0))
    for rank in range(1000):
        watch.observe(events.Started(rank, 1, 0))
    began = time.process_time()
    assert watch.status().state is State.RUNNING
    assert time.process_time() - began < patience(0.5)


@pytest.mark.parametrize(
    ("happened", "state", "since"),
    [
        ((), State.STARTING, 0),
        (STARTED[:2], State.STARTING, 0),
        (STARTED, State.RUNNING, 3),
        ((*STARTED, events.Exited(1, 101, 0, 0)), State.RUNNING, 3),
        ((*STARTED, events.Exited(1, 101, -9, 0)), State.STOPPING, 4),
        ((events.FailedToStart(0, 11, 0),), State.STOPPING, 1),
        ((*STARTED, events.Signalled(signal.SIGINT), events.Signalled(signal.SIGINT)), State.STOPPING, 4),
        ((*STARTED, events.Signalled(signal.SIGUSR2), events.Preempted()), State.PREEMPTED, 5),
        ((*STARTED, events.Preempted(), events.Exited(1, 101, 75, 0)), State.PREEMPTED, 4),
        ((*STARTED, events.Swept((), ())), State.SWEPT, 4),
        ((*STARTED, events.Swept((), ()), events.Ended(3, None)), State.ENDED, 5),
        ((events.Ended(2, None), PLANNED), State.ENDED, 1),
    ],
    ids=lambda value: value.name if isinstance(value, State) else None,
)
def test_states(happened, state, since):
    status = folded(PLANNED, *happened)
    assert (status.state, status.since) == (state, since)


def test_ranks():
    status = folded(PLANNED, *STARTED[:2], events.Exited(1, 101, 4, 0))
    assert [(each.pid, each.state, each.code) for each in status.ranks] == [
        (100, RankState.RUNNING, None),
        (101, RankState.EXITED, 4),
        (0, RankState.PENDING, None),
    ]


def test_an_end_that_is_seen_after_the_sweep():
    status = folded(PLANNED, *STARTED, events.Swept((), ()), events.Exited(1, 101, -9, 0))
    assert [each.state for each in status.ranks] == [RankState.EXITED] * 3
    assert [each.code for each in status.ranks] == [None, -9, None]


def test_a_rank_of_the_attempt_before_changes_nothing():
    again = events.Swept((), ()), events.Planned(PLAN, 1)
    assert folded(PLANNED, *STARTED, *again, events.Exited(0, 100, -9, 0)).ranks == folded(again[1]).ranks


def test_any_order_of_events_is_understood():
    """An observer may raise nothing. What is certain: between two attempts is a sweep."""
    chance = random.Random(1)
    for _ in range(100):
        attempt, swept, status = -1, True, Status.of(PLAN, 1, 0.0)
        for moment in range(40):
            rank = chance.randrange(4)
            event = chance.choice(
                [
                    *[events.Planned(PLAN, attempt + 1)] * swept,
                    *[events.Started(rank, 100 + rank, attempt)] * 3,
                    events.FailedToStart(rank, 11, attempt),
                    events.Exited(rank, 100 + rank, chance.choice([0, 1, -9]), attempt),
                    events.Signalled(15),
                    events.Preempted(),
                    events.Swept((), ()),
                    events.Restarting(attempt + 1, 0.0, "", None),
                    events.Noted("x"),
                    events.SidecarExited("x", 0),
                ]
            )
            if isinstance(event, events.Planned):
                attempt, swept = event.attempt, False
            swept = swept or isinstance(event, events.Swept)
            status = status.after(event, float(moment))
        assert status.after(events.Ended(0, None), 99.0).code == 0
