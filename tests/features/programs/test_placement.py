"""Tests of where programs run, without processes."""

import random
import time

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.programs.placement import place_programs
from ddplaunch.features.programs.spec import Programs, ProgramSpec

TARGET = ProgramSpec("trainer", (), "main", is_target=True)


def place(nnodes, *specs, target=TARGET):
    return place_programs(Programs(specs, target), nnodes)


def where(placement):
    return {each.spec.name: each.node for each in placement.instances}


def program(name, **fields):
    return ProgramSpec(name, (name,), **fields)


def test_nodes_with_ranks_come_first_then_those_of_each_program():
    placement = place(6, program("infer", nodes=2), program("env"), program("judge", nodes=1))
    assert placement.nodes_with_ranks == 3
    assert where(placement) == {"infer.0": 3, "infer.1": 4, "env": 0, "judge": 5}
    assert placement.gate == ("infer.0", "infer.1", "env", "judge")
    assert (placement.nearest_instance("infer", 4), placement.nearest_instance("infer", 0)) == ("infer.1", "infer.0")


def test_copies_beside_another_program_and_on_each_node():
    worker = program("worker", beside="data", count=2, after=("data",))
    exporter = program("exporter", each_node=True, kind="sidecar")
    placement = place(4, worker, program("data", nodes=2), exporter, program("log", beside="trainer"))
    assert where(placement) == {
        **{"worker.0": 2, "worker.1": 2, "worker.2": 3, "worker.3": 3},
        **{"data.0": 2, "data.1": 3},
        **{f"exporter.{node}": node for node in range(4)},
        **{"log.0": 0, "log.1": 1},
    }
    assert placement.instances[0].spec.after == ("data.0", "data.1")


@pytest.mark.parametrize(
    ("nnodes", "target_nodes", "expected"),
    [
        (2, 0, ("the programs need at least 3 nodes, and the job has 2", "trainer 1, infer 2; ")),
        (3, 2, ("the programs need 4 nodes, and the job has 3", "trainer 2, infer 2; ")),
        (5, 2, ("the programs need 4 nodes, and the job has 5", "")),
    ],
)
def test_a_job_with_another_number_of_nodes(nnodes, target_nodes, expected):
    target = ProgramSpec("trainer", (), "main", is_target=True, nodes=target_nodes)
    with pytest.raises(UsageError) as error:
        place(nnodes, program("infer", nodes=2), target=target)
    assert expected[0] == error.value.message
    assert error.value.hint.startswith(expected[1])


def test_random_programs_have_nodes_of_their_own_and_unique_names():
    seed = int(time.time())
    chance = random.Random(seed)
    for _ in range(300):
        specs = []
        for number in range(chance.randint(0, 5)):
            places = ({}, {"nodes": chance.randint(1, 3)}, {"each_node": True}, {"beside": "trainer"})
            specs.append(program(f"p{number}", **chance.choice(places), count=chance.randint(1, 3)))
        with_ranks, own = chance.randint(1, 4), sum(each.nodes for each in specs)
        placement = place(with_ranks + own, *specs)
        assert placement.nodes_with_ranks == with_ranks, seed
        names = [each.spec.name for each in placement.instances]
        assert len(names) == len({*names})
        for spec in specs:
            nodes = [each.node for each in placement.of(spec.name)]
            others = [each for each in placement.instances if each.node in nodes and each.program != spec.name]
            if spec.nodes:
                assert len(nodes) == spec.nodes * spec.count, seed
                assert min(nodes) >= with_ranks, seed
                assert all(each.spec.each_node for each in others), seed
            elif spec.each_node:
                assert sorted({*nodes}) == [*range(with_ranks + own)], seed
