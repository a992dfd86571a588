"""How node 0 brings the profiles of all ranks to the node that asked."""

from __future__ import annotations

import pytest

from ddplaunch.control.messages import Profiled, TakeProfile
from ddplaunch.control.profiles import BUSY, PATIENCE
from ddplaunch.diagnosis.profile import RankProfile
from ddplaunch.wire.frames import Garbled
from tests.control.test_coordinator import Job


@pytest.fixture
def job():
    """Two nodes with two ranks each, at work; node 1 has asked for a profile."""
    made = Job(min_nodes=2)
    made.join(1)
    made.told.clear()
    made.say(1, TakeProfile(7, 2.0))
    return made


def answers(job, node):
    return [message for number, message in job.told if number == node and isinstance(message, Profiled)]


def serial(job):
    (found,) = {message.serial for _, message in job.told if isinstance(message, TakeProfile)}
    return found


def test_each_ranks_goes_on_as_it_comes(job):
    asked = [number for number, message in job.told if isinstance(message, TakeProfile)]
    assert asked == [0, 1]
    number = serial(job)
    for node, rank in ((0, 1), (1, 2)):
        job.say(node, Profiled(number, RankProfile(rank, f"n{node}")))
        job.say(node, Profiled(number, over=True))
    assert [(each.serial, each.over) for each in answers(job, 1)] == [(7, False), (7, False), (7, True)]


def test_one_at_a_time(job):
    job.say(0, TakeProfile(1, 2.0))
    assert answers(job, 0) == [Profiled(1, over=True, refused=BUSY)]
    for node in (0, 1):
        job.say(node, Profiled(serial(job), over=True))
    job.told.clear()
    job.say(0, TakeProfile(2, 2.0))
    assert [number for number, _ in job.told] == [0, 1]


def test_a_node_that_is_late_is_named_and_one_that_is_lost_is_not_waited_for(job):
    job.say(1, Profiled(serial(job), over=True))
    job.wait(2 + PATIENCE + 0.1)
    assert answers(job, 1) == [Profiled(7, over=True, silent=("node 0 (n0)",))]
    job.told.clear()
    job.say(0, TakeProfile(8, 2.0))
    job.say(0, Profiled(serial(job), over=True))
    job.coordinator.lost(1, "its connection closed")
    job.wait(0)
    assert answers(job, 0)[-1] == Profiled(8, over=True)


def test_ranks_of_others_and_contradictions_are_garbled(job):
    with pytest.raises(Garbled):
        job.say(1, Profiled(serial(job), RankProfile(0, "n0")))
    with pytest.raises(ValueError, match="contradicts"):
        RankProfile(0, "n0", places=(1, 0))
