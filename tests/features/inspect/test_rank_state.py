"""Tests of what is read of a rank: the rank that a collective names, and the workers of a DataLoader."""

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
