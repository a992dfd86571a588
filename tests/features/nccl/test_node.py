"""Tests of the launcher's part in keeping the evidence of a stall, with a full disk and at the end of an attempt."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.events import AttemptSwept, JobStalled, RanksInspected
from ddplaunch.core.feature import FeatureContext
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.features.nccl import stall_files
from ddplaunch.features.nccl.node import StallSide
from ddplaunch.features.nccl.ras_report import parse_reply
from ddplaunch.features.nccl.rpc import StallReply
from ddplaunch.features.nccl.stall_files import STACKS_FILE, StallFiles
from ddplaunch.observe.diagnosis.inspection import Inspection
from tests.features.nccl.replies import make_json

INSPECTION = Inspection(1000.0, (), 1)
REPORT = parse_reply(b"SERVER PROTOCOL 2\nOK\nOK\n" + make_json({0: (os.getpid(), 7)}).encode())
STALLED = JobStalled(1000.0, "the ranks make no progress")


class Channel:
    """The channel of a rank that never writes its dump."""

    has_thread = True

    def write_line(self, line: bytes) -> None:
        pass


class Node:
    """The side of node 0, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.notes, self.bugs = EventLoop(), list[str](), list[str]()
        self.replies, handlers = list[Any](), dict[str, Any]()
        context = SimpleNamespace(
            job=SimpleNamespace(rpc=SimpleNamespace(handlers=handlers), emit=lambda event: None),
            loop=IsolatedLoop(self.loop, "nccl", self.bugs.append),
            log=SimpleNamespace(path=str(folder)),
            screen=SimpleNamespace(show_note=self.notes.append),
            find=lambda kind: None,
        )
        self.side = StallSide(cast("FeatureContext", context))
        self.side._inspect = lambda: None  # type: ignore[method-assign]
        self._handler = handlers["stall"]

    def start_attempt(self, number: int) -> NodeRanks:
        rank = SimpleNamespace(device="cpu")
        plan = SimpleNamespace(node_rank=0, world_size=1, local_ranks=[rank])
        process = SimpleNamespace(pid=os.getpid())
        ranks = cast(
            "NodeRanks", SimpleNamespace(number=number, plan=plan, processes={0: process}, channels={0: Channel()})
        )
        self.side.on_attempt_start(ranks)
        return ranks

    def request(self, ranks: NodeRanks) -> None:
        """The request of node 0 before it stops the ranks."""
        self._handler(self.side._context.loop, ranks, None, lambda reply, is_last: self.replies.append(reply))

    def run_until_collected(self) -> None:
        while self.loop._timers and not self.bugs:
            self.loop.run_once()
        assert not self.bugs


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setattr(stall_files, "DUMP_TIMEOUT_S", 0.05)
    monkeypatch.delenv("NCCL_RAS_ADDR", raising=False)
    return Node(tmp_path / "log")


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file can be opened for writing."""

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stall_files, "open_for_writing", refuse)


def test_only_what_was_written_is_named(node):
    ranks = node.start_attempt(0)
    node.request(ranks)
    node.run_until_collected()
    node.side.observe(RanksInspected(INSPECTION))
    assert node.replies == [StallReply()]
    assert node.side._kept_note == f"kept in {node.side._find_folder(0)}: {STACKS_FILE}"


def test_a_full_disk_is_no_bug(node, monkeypatch):
    """Node 0 gets its reply at once, and nothing is said to be kept."""
    fill_disk(monkeypatch)
    monkeypatch.setattr(stall_files, "ask_service", lambda *_: REPORT)
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    node.request(node.start_attempt(0))
    node.run_until_collected()
    assert node.replies == [StallReply()]
    node.side.observe(RanksInspected(INSPECTION))
    node.side.observe(AttemptSwept((), ()))
    assert node.side._kept_note == ""


def test_a_report_after_the_deadline_is_not_named(tmp_path, monkeypatch):
    """The thread may set it at any time; only what was there when the files were written counts."""
    ended, loop = list[StallFiles](), EventLoop()
    ranks = cast("NodeRanks", SimpleNamespace(processes={}, channels={}, plan=SimpleNamespace(world_size=1)))
    files = StallFiles(loop, ranks, str(tmp_path), None, ended.append)
    files.begin(1)
    assert ended == [], "begin itself never ends a collection"
    loop.run_once()
    assert ended == [files]
    monkeypatch.setattr(stall_files, "ask_service", lambda *_: REPORT)
    files._ask(("127.0.0.1", 1), lambda report: True)
    assert (files.ras, files.ras_file, [*tmp_path.iterdir()]) == (None, "", [])


def test_a_stop_request_waits_for_the_collection_that_runs(node):
    ranks = node.start_attempt(0)
    node.side.observe(STALLED)
    node.request(ranks)
    assert node.replies == []
    node.run_until_collected()
    assert node.replies == [StallReply()]


def test_a_collection_that_outlives_its_attempt(node, monkeypatch):
    """It answers its request, and leaves the state of the next attempt alone, whose collection goes on."""
    node.request(node.start_attempt(0))
    monkeypatch.setattr(stall_files, "DUMP_TIMEOUT_S", 600)
    ranks = node.start_attempt(1)
    node.side.observe(STALLED)
    node.side.observe(RanksInspected(INSPECTION))
    while not node.replies:
        node.loop.run_once()
    assert (node.side._collected, node.side._kept_note) == (None, "")
    node.request(ranks)
    assert len(node.replies) == 1, "the second waits for the collection of its own attempt"
    ranks.processes.clear()
    node.run_until_collected()
    assert len(node.replies) == 2
    assert node.side._kept_note == f"kept in {node.side._find_folder(1)}: {STACKS_FILE}"
    assert {*node.side._bytes} == {0, 1}
