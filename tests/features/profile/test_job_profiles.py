"""Tests of how node 0 collects the profiles of all ranks for the node that requested them."""

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
    """Two nodes with two running ranks each; node 1 has requested a profile."""
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


def test_only_one_profile_at_a_time(job):
    job.send(0, request(1))
    assert answers(job, 0) == [RpcReply(1, "profile", refusal=KIND.busy_error)]
    for node in (0, 1):
        job.send(node, RpcReply(serial(job), "profile"))
    job.sent.clear()
    job.send(0, request(2))
    assert [number for number, _ in job.sent] == [0, 1]


def test_malformed_profiles_are_refused(job):
    with pytest.raises(ProtocolError):
        job.send(1, RpcReply(serial(job), "profile", RankProfile(0, "n0"), is_last=False))
    with pytest.raises(ValueError, match="contradicts"):
        RankProfile(0, "n0", places=(1, 0))
    with pytest.raises(ValueError, match="a profile of"):
        ProfileRequest(1e6)
