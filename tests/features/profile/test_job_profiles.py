"""Tests of how node 0 collects the profiles of all ranks for the node that requested them."""

from __future__ import annotations

import pytest

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.job.job_profiles import BUSY_ERROR, REPLY_MARGIN_S
from ddplaunch.core.messages import ProfileReply, ProfileRequest
from ddplaunch.features.profile.rank_profile import RankProfile
from tests.core.job.test_coordinator import Job


@pytest.fixture
def job():
    """Two nodes with two ranks each, at work; node 1 has asked for a profile."""
    made = Job(min_nodes=2)
    made.join(1)
    made.sent.clear()
    made.send(1, ProfileRequest(7, 2.0))
    return made


def answers(job, node):
    return [message for number, message in job.sent if number == node and isinstance(message, ProfileReply)]


def serial(job):
    (found,) = {message.serial for _, message in job.sent if isinstance(message, ProfileRequest)}
    return found


def test_each_ranks_goes_on_as_it_comes(job):
    asked = [number for number, message in job.sent if isinstance(message, ProfileRequest)]
    assert asked == [0, 1]
    number = serial(job)
    for node, rank in ((0, 1), (1, 2)):
        job.send(node, ProfileReply(number, RankProfile(rank, f"n{node}")))
        job.send(node, ProfileReply(number, is_last=True))
    assert [(each.serial, each.is_last) for each in answers(job, 1)] == [(7, False), (7, False), (7, True)]


def test_one_at_a_time(job):
    job.send(0, ProfileRequest(1, 2.0))
    assert answers(job, 0) == [ProfileReply(1, is_last=True, refusal=BUSY_ERROR)]
    for node in (0, 1):
        job.send(node, ProfileReply(serial(job), is_last=True))
    job.sent.clear()
    job.send(0, ProfileRequest(2, 2.0))
    assert [number for number, _ in job.sent] == [0, 1]


def test_a_node_that_is_late_is_named_and_one_that_is_lost_is_not_waited_for(job):
    job.send(1, ProfileReply(serial(job), is_last=True))
    job.wait(2 + REPLY_MARGIN_S + 0.1)
    assert answers(job, 1) == [ProfileReply(7, is_last=True, silent_nodes=("node 0 (n0)",))]
    job.sent.clear()
    job.send(0, ProfileRequest(8, 2.0))
    job.send(0, ProfileReply(serial(job), is_last=True))
    job.coordinator.on_node_lost(1, "its connection closed")
    job.wait(0)
    assert answers(job, 0)[-1] == ProfileReply(8, is_last=True)


def test_ranks_of_others_and_contradictions_are_protocol_errors(job):
    with pytest.raises(ProtocolError):
        job.send(1, ProfileReply(serial(job), RankProfile(0, "n0")))
    with pytest.raises(ValueError, match="contradicts"):
        RankProfile(0, "n0", places=(1, 0))
