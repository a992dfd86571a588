"""Tests of a node's ranks among those of other nodes, and of several nodes on one machine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ddplaunch.system.plan.node_spec import NodeSpec, assign_nodes, make_node_spec, with_all_nodes, with_assignment
from tests.system.plan.test_plan import plan


def shares(*hosts: str, ranks: int = 2) -> list[NodeSpec]:
    return [NodeSpec(number, host, ("cpu",) * ranks) for number, host in enumerate(hosts)]


def test_first_ranks_of_nodes_follow_each_other():
    uneven = [NodeSpec(0, "a", ("cpu",) * 2), NodeSpec(3, "b", ("cpu",)), NodeSpec(4, "c", ("cpu",) * 4)]
    assert [(each.node_rank, each.nnodes, each.first_rank, each.world_size) for each in assign_nodes(uneven)] == [
        (0, 3, 0, 7),
        (1, 3, 2, 7),
        (2, 3, 3, 7),
    ]


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b"), ("a", "b", "a", "b")])
def test_tasks_on_one_machine(hosts):
    found = [(each.host_index, each.host_count, each.nodes_on_host) for each in assign_nodes(shares(*hosts))]
    assert found == [("ab".index(host), 2, 2) for host in hosts]


def placed(number: int, *hosts: str):
    """The plan of one node of those, of two ranks each."""
    made = plan(nproc="2", nnodes=len(hosts), node_rank=number, master_addr="a", master_port=7)
    place = list(assign_nodes(shares(*hosts)))[number]
    return with_assignment(made, place, "mine", "10.0.0.1", {"X": "1"})


def test_the_plan_of_a_node_has_its_own_ranks():
    made = placed(2, "a", "b", "c")
    assert ([rank.rank for rank in made.ranks], made.world_size, made.nnodes) == ([4, 5], 6, 3)
    assert [rank.rank for rank in made.local_ranks] == [4, 5]
    variables = made.rank_environment(made.rank_of(5))
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK MASTER_ADDR X"
    assert [variables[name] for name in names.split()] == ["5", "1", "6", "2", "2", "3", "2", "10.0.0.1", "1"]


def test_the_plan_of_node_0_has_all_ranks():
    made = with_all_nodes(placed(0, "a", "b", "c"), shares("a", "b", "c"))
    assert [(rank.rank, rank.node_rank, rank.local_rank, rank.host) for rank in made.ranks][1:] == [
        (1, 0, 1, make_node_spec(made).host),
        (2, 1, 0, "b"),
        (3, 1, 1, "b"),
        (4, 2, 0, "c"),
        (5, 2, 1, "c"),
    ]
    assert (made.world_size, made.nnodes) == (6, 3)


STARTED = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": None, "GROUP_RANK": None, "GROUP_WORLD_SIZE": None, "NODE_RANK": None}


@pytest.mark.parametrize(
    ("started", "filled"),
    [
        (STARTED, ("2", "1", "2", "1")),
        ({**STARTED, "LOCAL_WORLD_SIZE": "2"}, ("2", "1", "2", "1")),
        ({**STARTED, "LOCAL_WORLD_SIZE": "4"}, ("4", None, None, None)),  # its launcher sees other machines
        ({**STARTED, "GROUP_RANK": "7"}, (None, "7", None, None)),
    ],
)
def test_an_external_rank_gets_its_local_world_size_and_node(started, filled):
    made = replace(plan(nproc="1", nnodes=4, node_rank=3, master_addr="a", master_port=7), started_rank=started)
    place = list(assign_nodes(shares("a", "b", "a", "b", ranks=1)))[3]
    found = with_assignment(made, place, "mine", "a", {}).started_rank
    names = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
    assert tuple(found[name] for name in names) == filled
