"""Tests of the runner, where the order of effects matters."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from signal import SIGHUP, SIGTERM
from types import SimpleNamespace

import pytest

from ddplaunch.core import messages
from ddplaunch.core.agent import process_tree
from ddplaunch.core.agent.process_tree import ProcessTree
from ddplaunch.core.agent.runner import NodeRunner
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from tests.constant_override import write_launcher
from tests.features.runs.recorded_events import plan

RECORD_CLOSING = """
    from ddplaunch.core.net.coordinator_server import CoordinatorServer
    from ddplaunch.core.agent.process_tree import ProcessTree
    from ddplaunch.core.agent.run_temp_dir import RunTempDir
    from ddplaunch.core.agent.store_host import StoreHost

    def record(owner, name):
        original = getattr(owner, name)

        def call(self, *arguments):
            with open("closed", "a") as file:
                file.write(owner.__name__ + "\\n")
            return original(self, *arguments)

        setattr(owner, name, call)

    record(CoordinatorServer, "close")
    record(ProcessTree, "close")
    record(RunTempDir, "remove")
    record(StoreHost, "close")
"""


def test_the_order_of_closing(start_ddplaunch, tmp_path):
    """Files go after the processes that use them, and the store's port last: another job may take it then."""
    launcher = write_launcher(tmp_path, RECORD_CLOSING)
    job = start_ddplaunch("run", "--nproc", "2", "--no-python", "true", executable=launcher)
    assert job.wait() == 0, job.stderr()
    closed = (tmp_path / "closed").read_text().split()
    assert closed == ["CoordinatorServer", "ProcessTree", "RunTempDir", "StoreHost"]


def make_runner(questions, handled, **parts):
    """Make a runner whose machine returns these commands for an event, with these parts of a node."""
    runner = object.__new__(NodeRunner)

    def on(event, now):
        handled.append(event)
        return iter(questions.get(event, ()))

    runner._machine = SimpleNamespace(on=on, wake_at=lambda: None)
    runner._inbox, runner._replies, runner._is_handling = deque(), deque(), False
    runner._timer = SimpleNamespace(set=lambda moment: None)
    vars(runner).update(parts)
    return runner


def test_replies_come_before_other_events_and_none_from_within():
    """The machine asks two questions; the effect of the first one posts an event of its own."""
    handled = []

    def withdraw_spawns():
        runner.post(ev.OutputDrained())
        assert handled == [ev.DeadlineDue()]
        return [3]

    killed = []
    tree = SimpleNamespace(withdraw_spawns=withdraw_spawns, kill_remaining=list, kill=lambda: killed.append(1))
    tree.close = lambda: "killed" if killed else "alive"
    commands = [do.WithdrawSpawns(), do.KillRemaining(), do.KillZygote()]
    runner = make_runner({ev.DeadlineDue(): commands}, handled, tree=tree)
    runner.post(ev.DeadlineDue())
    replies = [ev.SpawnsWithdrawn((3,)), ev.RemainingKilled(()), ev.ZygoteLost("killed")]
    assert handled == [ev.DeadlineDue(), *replies, ev.OutputDrained()]


def test_a_stop_spares_ranks_that_handle_an_exception_unless_all_are_meant():
    handled, sent = [], []
    processes = {rank: SimpleNamespace(stop=lambda number, rank=rank: sent.append((rank, number))) for rank in (0, 1)}
    commands = [do.StopRanks(SIGTERM, spare_failing=True), do.StopRank(1), do.StopRanks(SIGHUP)]
    runner = make_runner({ev.DeadlineDue(): commands}, handled, _ranks=SimpleNamespace(processes=processes))
    runner.sides = SimpleNamespace(find_exception=lambda rank: ("ValueError", "") if rank == 1 else None)
    runner.post(ev.DeadlineDue())
    assert sent == [(0, SIGTERM), (1, SIGTERM), (0, SIGHUP), (1, SIGHUP)]
    assert handled[1:] == [ev.StopSent((0,)), ev.StopSent((0, 1))]


def test_a_preemption_that_no_rank_can_be_notified_of_is_noted_once():
    notes, commands = [], [do.CreatePreemptionFile(report_error=error) for error in (True, False)]
    context = SimpleNamespace(preemption_file=SimpleNamespace(create=lambda: "the disk is full"))
    runner = make_runner({ev.DeadlineDue(): commands}, [], context=context)
    runner._screen = SimpleNamespace(show_note=notes.append)
    runner.post(ev.DeadlineDue())
    assert notes == ["cannot notify the ranks of the preemption: the disk is full"]


@pytest.mark.parametrize("shell_children", [frozenset(), frozenset({10})])
def test_which_processes_are_of_the_job(monkeypatch, shell_children):
    """A shell that became the launcher may have left it children."""
    tree = object.__new__(ProcessTree)
    tree.other_zygotes, tree.unrelated_pids, tree._sessions = {7}, shell_children, {50}
    marked = max(Path("/proc/self/environ").read_bytes().split(b"\0"), key=len)
    tree.temp_dir = SimpleNamespace(path=os.fsdecode(marked))
    sessions = {10: 50, 11: 50, os.getpid(): 60}
    monkeypatch.setattr(process_tree.os, "getsid", lambda pid: sessions.get(pid) or os.kill(1 << 30, 0))
    unrelated = [pid for pid in (7, 10, 11, os.getpid(), 1 << 30) if tree._is_unrelated(pid)]
    assert unrelated == ([7, 10, 1 << 30] if shell_children else [7])


def test_a_node_gets_its_rank_when_it_joins():
    handled, received = [], []
    runner = make_runner({}, handled, _plan=plan(ranks=1), sides=SimpleNamespace(on_message=received.append))
    joined = messages.JoinAccepted("theirs", 15.0, node_rank=3)
    runner._on_message(joined)
    assert (runner._plan.node_rank, handled, received) == (3, [ev.MessageReceived(0, joined)], [joined])
