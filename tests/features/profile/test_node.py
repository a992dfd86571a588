"""Tests of the launcher's and a rank's part of a profile, and of its messages."""

import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.stack_frames import Frame
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.rank.rank_runner import load_private_module
from ddplaunch.features.profile.hot_spots import NATIVE_FRAME, describe_late_ranks, find_hot_spots, find_outliers
from ddplaunch.features.profile.node import NodeProfiler
from ddplaunch.features.profile.rank_profile import STARTING, CollectiveKind, RankProfile
from ddplaunch.features.profile.rpc import KIND, ProfileRequest
from ddplaunch.observe.node.rank_stack_dump import NO_SIGNAL_ERROR


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
        NodeProfiler(loop, cast("NodeRanks", ranks), request, lambda reply, is_last: replies.append(reply)).start()
    channel.close()
    assert [reply.missing_reason for reply in replies if reply] == [reason]


@pytest.mark.parametrize("in_main_thread", [False, True])
def test_all_ticks_without_a_signal_are_at_the_place_of_the_main_thread(tmp_path, monkeypatch, in_main_thread):
    """A rank in native code handles no tick. The flight recorder takes long: the main thread does not read it."""
    recorder = SimpleNamespace(_dump_fr_trace_json=lambda details, stacks: b'{"details":\n%d}' % details)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=recorder)))
    wakes, is_possible = list[bool](), [True]
    endpoint = SimpleNamespace(
        main_thread=threading.main_thread().ident,
        can_wake=lambda: is_possible[0],
        wake_main_thread=lambda: wakes.append(True),
    )
    side = load_private_module("features/profile/rank/profile_side").Side(SimpleNamespace(endpoint=endpoint))
    frame = sys._getframe() if in_main_thread else None
    side._on_request(b"p 40 %d 1000 7 100 0 %s" % (time.monotonic_ns(), os.fsencode(tmp_path / "profile")), frame)
    assert wakes == [True] * (not in_main_thread)
    side._on_request(b"q", frame)
    lines = (tmp_path / "profile").read_bytes().splitlines()
    (place,) = (line for line in lines if line.startswith(b"r "))
    assert place.split()[2:] == [b"7"]
    assert int(place.split()[1]) > 0, "not at the root"
    assert any(line.startswith(b"c test_all_ticks") for line in lines)
    assert [line for line in lines if line.startswith(b"t ")] == [b't {"details": 1}'] * (not in_main_thread)
    (tmp_path / "profile").unlink()
    is_possible[0] = False
    side._on_request(b"q", frame)
    assert not [*tmp_path.iterdir()], "a program that has taken the signal is not profiled"


@pytest.mark.parametrize(
    ("loads", "late", "outliers"),
    [
        ((10, 10, 90, 20), (), [(2, 0.9, 0.1)]),
        ((10, 10, 90, 50), (), []),  # rank 3 differs too
        ((10, 10, 14, 10), (), []),  # by less than 5 %
        ((10, 40, 90, 50), (1, 1, 7), [(1, 0.6, 0.5)]),  # in the other line
        ((10, 10, 90, 10), (1,), []),
        ((90,), (), []),
        ((), (), []),
    ],
)
def test_the_rank_whose_time_is_in_another_line(loads, late, outliers):
    frames = Frame("train", "train.py", 9, own=True), Frame("load", "data.py", 3, own=True)
    profiles = [
        RankProfile(rank, "n0", frames=frames, places=(0, 0, 0, 1), ticks=(1, 100 - load, 2, load))
        for rank, load in enumerate(loads)
    ]
    found = find_outliers(find_hot_spots(profiles), late)
    assert [(each.rank, each.share, each.others) for each in found] == outliers


def test_a_line_calls_the_collective_and_not_the_decorator_around_it():
    frames = (
        Frame("main", "train.py", 14, own=True),
        Frame("wrapper", "/lib/python3/site-packages/torch/distributed/c10d_logger.py", 83, own=False),
        Frame("all_reduce", "/lib/python3/site-packages/torch/distributed/distributed_c10d.py", 3000, own=False),
    )
    profile = RankProfile(0, "n1", frames=frames, places=(0, 0, 1, 1, 2, 2), ticks=(3, 10))
    (spot,) = find_hot_spots([profile])
    assert (spot.line, spot.calls) == (frames[0], "all_reduce")


def test_the_rank_that_enters_collectives_last():
    """Of collectives of several operations the first counts; clocks of hosts must have been compared."""
    kinds = (CollectiveKind("0", "default_pg", "all_reduce", ""),)
    profiles = []
    for rank, late in enumerate((0, 30_000, 0)):
        begins = [(number, number * 100_000 + late + more) for number in range(40) for more in (0, 50)]
        calls = tuple(figure for number, begin in begins for figure in (0, number, begin, 0))
        profiles.append(RankProfile(rank, f"n{rank}", "", 10.0, 0.001, kinds=kinds, calls=calls))
    (sentence,), ranks = describe_late_ranks(profiles)
    assert (ranks, sentence.partition(" of ")[0]) == ([1], "rank 1 was last in 100 %")
    (sentence,), ranks = describe_late_ranks(replace(each, error=None) for each in profiles)
    assert (ranks, sentence.rpartition(": ")[2]) == ([], "their clocks have not been compared yet")


def test_malformed_profiles_and_requests_are_refused():
    assert KIND.busy_error == "this job is being profiled already"
    for what in (
        *({"places": rows} for rows in ((0,), (0, 1), (1, 0), (0, 0, 2, 0))),
        *({"places": (0, 0), "ticks": rows} for rows in ((1,), (2, 5))),
        *({"calls": rows} for rows in ((0, 1, 0), (1, 1, 0, 0))),
    ):
        with pytest.raises(ValueError, match="contradicts"):
            RankProfile(0, "n0", frames=(NATIVE_FRAME,), kinds=(CollectiveKind("0", "", "all_reduce", ""),), **what)
    with pytest.raises(ValueError, match="a profile of"):
        ProfileRequest(1e6)


def test_the_profiler_of_torch_runs_until_the_end_or_until_the_program_starts_its_own(tmp_path, monkeypatch):
    module = load_private_module("features/profile/rank/profile_sampler")
    log, own_profile, result = list[str](), type("profile", (), {"kineto_results": None}), tmp_path / "p.torch"

    def make(activities: list[str]) -> SimpleNamespace:
        calls = {"start": lambda: log.append(" ".join(activities)), "stop": lambda: log.append("stop")}
        return SimpleNamespace(**calls, export_chrome_trace=lambda path: Path(path).touch())

    torch = SimpleNamespace(
        _C=SimpleNamespace(_autograd=SimpleNamespace(_profiler_enabled=lambda: "on" in log)),
        cuda=SimpleNamespace(is_initialized=lambda: "has cuda" in log),
        profiler=SimpleNamespace(profile=make, ProfilerActivity=SimpleNamespace(CPU="cpu", CUDA="cuda")),
    )
    starts = SimpleNamespace(profile=own_profile, _prepare_profiler=log.append, _enable_profiler=log.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", starts)

    def begin(*before: str, seconds: int = 600) -> Any:
        log[:] = before
        trace = module.TorchProfiler(str(tmp_path / "p"), time.monotonic_ns() + seconds * 10**9)
        for _ in range(2):
            trace.start()
            trace.stop_if_due()
        return trace

    trace = begin()
    assert (log, trace.is_running, result.exists()) == (["cpu"], True, False)
    thread = threading.Thread(target=lambda: starts._enable_profiler("in a thread"))
    thread.start()
    thread.join()
    starts._prepare_profiler("own")
    starts._enable_profiler("own too")
    assert (log[1:], trace.is_running, result.exists()) == (["in a thread", "stop", "own", "own too"], False, True)
    begin("has cuda", seconds=0)
    assert log == ["has cuda"], "the profile is over"
    trace = begin("has cuda")
    trace.end_ns = 0
    trace.stop_if_due()
    assert log == ["has cuda", "cpu cuda", "stop"]
    begin("on")
    assert log == ["on"]
    own = own_profile()
    begin()
    assert log == [], "it would lose the results of the program's profiler"
    own.kineto_results = "done"
    begin()
    assert log == ["cpu"]
