"""Tests of what ``ddplaunch stacks`` prints."""

from types import SimpleNamespace

from ddplaunch.base.errors import host_name
from ddplaunch.base.stack_frames import Frame
from ddplaunch.features.stacks import command
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection, Thread


def rank_in(function, rank, host):
    thread = Thread((Frame(function, "train.py", 3, own=True),))
    return RankInspection(rank, host, 100 + rank, ProcessCondition.ALIVE, threads=(thread,))


def test_the_stacks_by_py_spy_of_one_rank_of_each_group_here_come_last(monkeypatch, capsys):
    here = [rank_in(function, rank, host_name()) for rank, function in enumerate(("load", "load", "save"))]
    reply = SimpleNamespace(inspection=Inspection(0.0, (*here, rank_in("think", 3, "elsewhere")), 4))
    monkeypatch.setattr(command, "find_running_batch_job", lambda run, command: None)
    monkeypatch.setattr(command, "find_running", lambda run: SimpleNamespace(path=""))
    monkeypatch.setattr(command.client, "send_request", lambda path, request: reply)
    monkeypatch.setattr(command.py_spy, "find_py_spy", lambda option: "spy")
    monkeypatch.setattr(command.py_spy, "dump_stacks", lambda tool, pid, words: f"  {tool} {pid} {' '.join(words)}\n")
    command.stacks.callback(None, native=True, with_locals=True, as_json=False)
    shown = capsys.readouterr().out
    assert all(function in shown for function in ("load", "save", "think"))
    dumps = [f"\nrank {rank}, by py-spy:\n  spy {100 + rank} --native --locals\n" for rank in (2, 0)]
    assert shown.endswith("".join(dumps))
    assert shown.count("by py-spy") == 2
