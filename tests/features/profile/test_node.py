"""Tests of the launcher's part of a profile, and of its messages."""

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.core.node.rank_channel import RankChannel
from ddplaunch.features.inspect.node.rank_stack_dump import NO_SIGNAL_ERROR
from ddplaunch.features.profile.node import RankProfiler
from ddplaunch.features.profile.rank_profile import STARTING, RankProfile
from ddplaunch.features.profile.rpc import KIND, ProfileRequest


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        ("", STARTING),
        ("h 34 35 9\n", STARTING),  # inspection has begun in the rank; its part of profiles not yet
        ("h 34 35 9\no profile 0\n", NO_SIGNAL_ERROR),
    ],
)
def test_a_rank_is_starting_until_it_has_reported_the_signal_of_profiles(reported: str, reason: str):
    loop, replies = EventLoop(), list[Any]()
    channel = RankChannel(loop, lambda what: None)
    with socket.socket(fileno=channel.rank_fd) as rank_end:
        rank_end.sendall(reported.encode())
        rank = SimpleNamespace(rank=0, host="")
        plan = SimpleNamespace(local_ranks=[rank], rank_of=lambda number: rank)
        ranks = SimpleNamespace(
            processes={0: SimpleNamespace(pid=os.getpid())},
            channels={0: channel},
            plan=plan,
            attempt=SimpleNamespace(not_spawned=0),
            rank_file_path=lambda rank, kind: None,
        )
        request = RpcRequest(1, "profile", 5.0, ProfileRequest(0.1))
        RankProfiler(loop, cast("NodeRanks", ranks), request, lambda reply, is_last: replies.append(reply)).start()
    channel.close()
    assert [reply.missing_reason for reply in replies if reply] == [reason]


def test_malformed_profiles_and_requests_are_refused():
    assert KIND.busy_error == "this job is being profiled already"
    with pytest.raises(ValueError, match="contradicts"):
        RankProfile(0, "n0", places=(1, 0))
    with pytest.raises(ValueError, match="a profile of"):
        ProfileRequest(1e6)
