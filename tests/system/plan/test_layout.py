"""Tests of the layout of ranks: counts, numbering, binding and threads."""

from __future__ import annotations

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.plan.rank_layout import (
    DeviceSlot,
    Node,
    assign_ranks,
    choose_numa_cpus,
    parse_nproc,
    threads_per_rank,
)


@pytest.mark.parametrize(
    ("text", "nnodes", "gpus", "counts", "source"),
    [
        ("4", 1, 0, (4,), "--nproc"),
        ("8", 3, 0, (8, 8, 8), "--nproc"),
        ("8,8,4", 3, 0, (8, 8, 4), "--nproc"),
        ("auto", 2, 4, (4, 4), "4 GPUs found"),
        ("auto", 1, 1, (1,), "1 GPU found"),
        ("auto", 2, 0, (1, 1), "no GPU found, so one process"),
        ("gpu", 1, 2, (2,), "2 GPUs found"),
        ("cpu", 2, 4, (6, 6), "6 physical cores found"),
    ],
)
def test_nproc(text, nnodes, gpus, counts, source):
    assert parse_nproc(text, nnodes, gpus=gpus, physical_cpus=6) == (counts, source)


@pytest.mark.parametrize("text", ["0", "-1", "four", "", ",", "8,", "8,x,8", "8,0,8", "1.5", "8,8", "8,8,8,8", "gpu"])
def test_nproc_that_makes_no_sense(text):
    with pytest.raises(UsageError, match=f"^--nproc {text}"):
        parse_nproc(text, 3, gpus=0, physical_cpus=6)


def nodes(*counts: int) -> list[Node]:
    return [Node(index, f"host{index}", count, "--nproc") for index, count in enumerate(counts)]


def test_global_rank_is_the_sum_of_the_counts_below_plus_the_local_rank():
    ranks = assign_ranks(nodes(3, 1, 2), [DeviceSlot("cuda:0"), DeviceSlot("cuda:1")], {})
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3, 4, 5]
    assert [rank.node_rank for rank in ranks] == [0, 0, 0, 1, 2, 2]
    assert [rank.local_rank for rank in ranks] == [0, 1, 2, 0, 0, 1]
    assert [rank.device for rank in ranks] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0", "cuda:0", "cuda:1"]
    assert [rank.host for rank in ranks] == ["host0", "host0", "host0", "host1", "host2", "host2"]
    assert {rank.cpus for rank in ranks} == {None}


def test_each_node_is_bound_by_its_own_count():
    ranks = assign_ranks(nodes(2, 1), [DeviceSlot("cpu")], {2: [(0,), (1,)], 1: [(0, 1)]})
    assert [rank.cpus for rank in ranks] == [(0,), (1,), (0, 1)]


@pytest.mark.parametrize(
    ("slots", "count", "numa", "allowed", "bound"),
    [
        ([DeviceSlot("cpu")], 4, [(0, 1), (2, 3)], range(4), [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ([DeviceSlot("cpu")], 3, [(0, 1), (2, 3)], range(4), [(0, 1), (0, 1), (2, 3)]),
        ([DeviceSlot("cpu")], 1, [(0, 1), (2, 3)], range(4), [(0, 1)]),
        ([DeviceSlot("cpu")], 2, [(0, 1), (2, 3)], [0, 1], [(0, 1), (0, 1)]),
        ([DeviceSlot("cpu")], 2, [], [0, 5], [(0, 5), (0, 5)]),
        (
            [DeviceSlot("cuda:0", cpus=(2, 3)), DeviceSlot("cuda:1", cpus=(0, 1))],
            2,
            [(0, 1), (2, 3)],
            range(4),
            [(2, 3), (0, 1)],
        ),
        ([DeviceSlot("cuda:0", cpus=(2, 3))], 1, [(0, 1), (2, 3)], [0, 1], [(0, 1)]),
        ([DeviceSlot("cuda:0", cpus=(1,))], 2, [(0, 1)], range(2), [(1,), (1,)]),
    ],
)
def test_numa_binding(slots, count, numa, allowed, bound):
    assert list(choose_numa_cpus(slots, count, numa, allowed)) == bound


@pytest.mark.parametrize(
    ("count", "allowed", "bound", "threads"),
    [
        (4, 32, (), 8),
        (3, 32, (), 10),
        (8, 4, (), 1),
        (2, 4, [(0, 1), (2, 3)], 2),
        (4, 4, [(0, 1), (0, 1), (2, 3), (2, 3)], 1),
        (3, 8, [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6)], 2),
    ],
)
def test_threads_per_rank(count, allowed, bound, threads):
    assert threads_per_rank(count, allowed, bound) == threads
