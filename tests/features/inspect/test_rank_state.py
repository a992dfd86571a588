"""Tests of what is read of a rank: the call that it is in, and the workers of a DataLoader."""

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.features.inspect.diagnosis.inspection import Worker
from ddplaunch.features.inspect.node import dataloader_workers
from ddplaunch.features.inspect.rank import torch_state

WORLD = {"world": 10, "pair": 20}  # the first global rank of each group


@pytest.mark.parametrize(
    ("function", "variables", "rank"),
    [
        ("broadcast", {"src": 3, "group": "pair"}, 3),
        ("broadcast", {"src": None, "group": None, "group_src": 1}, 11),
        ("reduce", {"dst": None, "group": "pair", "group_dst": 1}, 21),
        ("broadcast", {"dst": 3}, -1),
        ("all_reduce", {"src": 3}, -1),
    ],
)
def test_the_rank_that_a_collective_names(function, variables, rank):
    module = SimpleNamespace(
        _get_default_group=lambda: "world", get_global_rank=lambda group, number: WORLD[group] + number
    )
    frame = SimpleNamespace(f_code=SimpleNamespace(co_name=function), f_locals=variables)
    assert torch_state._named_rank(cast("Any", module), cast("Any", frame)) == rank


@pytest.mark.parametrize(
    ("of_loader", "found"),
    [(True, [Worker(12, code=1), Worker(13, stopped=True)]), (False, [Worker(n, stopped=True) for n in (13, 15)])],
)
def test_workers_that_cannot_be_asked(monkeypatch, of_loader, found):
    """A rank that waits for its DataLoader waits for no other child process; other ranks wait for any that is alive."""
    stats = {
        11: ("pt_data_worker", None, False),
        12: ("pt_data_worker", 1, False),
        13: ("pt_data_worker", None, True),
        14: ("python", 1, False),
        15: ("python", None, True),
    }
    monkeypatch.setattr(dataloader_workers, "_list_children", lambda pid: [*stats])
    monkeypatch.setattr(dataloader_workers, "_read_stat", lambda pid, parent: stats[pid])
    process = cast("Any", SimpleNamespace(pid=10))
    assert dataloader_workers.DataLoaderWorkers(process, cast("Any", None), of_loader=of_loader).found == found


def test_the_processes_that_a_rank_has_started():
    """Its own children only: a process id may have been given to another process."""
    alive, stopped, ended = (
        subprocess.Popen(["sh", "-c", line]) for line in ("exec sleep 600", "kill -STOP $$", "exit 3")
    )
    try:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert {alive.pid, stopped.pid, ended.pid} <= {*dataloader_workers._list_children(os.getpid())}
        assert dataloader_workers._read_stat(alive.pid, os.getpid())[1:] == (None, False)
        assert dataloader_workers._read_stat(stopped.pid, os.getpid()) == ("sh", None, True)
        assert dataloader_workers._read_stat(ended.pid, os.getpid()) == ("sh", 3, False)
        assert dataloader_workers._read_stat(alive.pid, os.getppid()) is None
    finally:
        for each in (alive, stopped, ended):
            each.send_signal(signal.SIGKILL)
            each.wait()
    assert dataloader_workers._read_stat(alive.pid, os.getpid()) is None


DISTRIBUTED = """
def broadcast_object_list(call): return wrapper(lambda: broadcast(3, call))
def wrapper(function): return function()
def broadcast(src, call): return call()
def _exception_logger(call): return broadcast_object_list(call)
def _object_to_tensor(call): return call()
def _private(call): return _private_too(call)
def _private_too(call): return call()
def barrier(call): return call()
"""


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (["_exception_logger"], b"broadcast_object_list broadcast 3"),
        (["barrier"], b"barrier barrier -1"),
        (["_private"], b"_private _private_too -1"),
        (["_exception_logger", "_object_to_tensor"], b""),
        ([], b""),
    ],
)
def test_the_call_that_a_rank_is_in(functions, words):
    """The function that the program has called, not a decorator around it; while it pickles, it is in none."""
    names: dict[str, Any] = {}
    exec(compile(DISTRIBUTED, "distributed_c10d.py", "exec"), names)
    module = cast("Any", SimpleNamespace(__file__="distributed_c10d.py", Work=(), **names))
    call: Callable[[], bytes] = lambda: torch_state._call(module)  # noqa: E731
    for name in reversed(functions):
        call = partial(names[name], call)
    assert call() == words
