"""Tests of how node 0 collects the profiles of all ranks for the node that requested them."""

from __future__ import annotations

import pytest

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.messages import RpcReply, RpcRequest
from ddplaunch.features.profile.rank_profile import RankProfile
from ddplaunch.features.profile.rpc import KIND, REPLY_MARGIN_S, ProfileRequest
from tests.core.job.test_machine import Job


def request(serial):
    return RpcRequest(serial, "profile", 2.0 + REPLY_MARGIN_S, ProfileRequest(2.0))


@pytest.fixture
def job():
    """Two nodes with two ranks each, at work; node 1 has asked for a profile."""
    made = Job(min_nodes=2)
    made.join(1)
    made.sent.clear()
    made.send(1, request(7))
    return made


def answers(job, node):
    return [message for number, message in job.sent if number == node and isinstance(message, RpcReply)]


def serial(job):
    (found,) = {message.serial for _, message in job.sent if isinstance(message, RpcRequest)}
    return found


def test_each_ranks_goes_on_as_it_comes(job):
    asked = [number for number, message in job.sent if isinstance(message, RpcRequest)]
    assert asked == [0, 1]
    number = serial(job)
    for node, rank in ((0, 1), (1, 2)):
        job.send(node, RpcReply(number, "profile", RankProfile(rank, f"n{node}"), is_last=False))
        job.send(node, RpcReply(number, "profile"))
    assert [(each.serial, each.is_last) for each in answers(job, 1)] == [(7, False), (7, False), (7, True)]


def test_one_at_a_time(job):
    job.send(0, request(1))
    assert answers(job, 0) == [RpcReply(1, "profile", refusal=KIND.busy_error)]
    for node in (0, 1):
        job.send(node, RpcReply(serial(job), "profile"))
    job.sent.clear()
    job.send(0, request(2))
    assert [number for number, _ in job.sent] == [0, 1]


def test_a_node_that_is_late_is_named_and_one_that_is_lost_is_not_waited_for(job):
    job.send(1, RpcReply(serial(job), "profile"))
    job.wait(2 + REPLY_MARGIN_S + 0.1)
    assert answers(job, 1) == [RpcReply(7, "profile", silent_nodes=("node 0 (n0)",))]
    job.sent.clear()
    job.send(0, request(8))
    job.send(0, RpcReply(serial(job), "profile"))
    job.lose(1)
    job.wait(0)
    assert answers(job, 0)[-1] == RpcReply(8, "profile")


def test_ranks_of_others_and_contradictions_are_protocol_errors(job):
    with pytest.raises(ProtocolError):
        job.send(1, RpcReply(serial(job), "profile", RankProfile(0, "n0"), is_last=False))
    with pytest.raises(ValueError, match="contradicts"):
        RankProfile(0, "n0", places=(1, 0))
    with pytest.raises(ValueError, match="a profile of"):
        ProfileRequest(1e6)
