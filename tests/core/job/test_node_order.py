"""Tests of the order of nodes by domain: a pure function, and in the histories of a job."""

import json
from random import Random

import pytest

from ddplaunch.core import messages
from ddplaunch.core.job.node_order import NodePlace, describe_domains, order_nodes
from ddplaunch.system.plan.domain import find_domain, read_switch
from tests.conftest import free_port, write_program
from tests.core.job.job_steps import CHECKED, Job, notes_of
from tests.core.job.test_spares import lose, started
from tests.fake_nvml import fake_nvml as fake_nvml

LAYOUTS = 10_000
FABRICS = 300


def domains_of(order, places):
    """The domains of nodes in the order of their ranks, without repetition of neighbours."""
    known = {each.node_rank: each.domain for each in places}
    listed = [known[number] for number in order]
    return [each for index, each in enumerate(listed) if index == 0 or listed[index - 1] != each]


def fabric_name(number):
    """The name of an NVLink domain, as the GPUs of one of several racks report it; cliques split some racks."""
    return f"c0ffee00-1111-2222-3333-{number // 2:012x}.{number % 2}"


def fabric(domains=18, size=4, *, seed=1, spares=()):
    """Nodes that have joined in any order; ``spares``: the numbers of the domains of more."""
    names = [fabric_name(number) for number in range(domains) for _ in range(size)]
    names += [fabric_name(number) for number in spares]
    Random(seed).shuffle(names)
    return [NodePlace(number, name) for number, name in enumerate(names)]


@pytest.mark.parametrize("segment", [1, 4])
def test_a_fabric_of_18_nvlink_domains_comes_out_in_order(segment):
    """Whatever the order in which 72 nodes have joined; then two are lost, and spares of their domains replace them."""
    for seed in range(FABRICS):
        lost = Random(seed).choices(range(18), k=2)  # their domains, perhaps the same one
        places = fabric(seed=seed, spares=lost)
        known = {each.node_rank: each for each in places}
        order = order_nodes(places, [], (), 72, segment)
        assert len({*order}) == len(order) == 72, seed
        assert order[0] == 0, seed
        assert len(domains_of(order, places)) == 18, seed
        before = [known[number] for number in order]
        gone = []
        for domain in map(fabric_name, lost):
            gone.append(next(each for each in before[1:] if each.domain == domain and each not in gone))
        left = [each for each in places if each not in gone]
        after = order_nodes(left, before, (), 72, segment)
        assert {*after} == {each.node_rank for each in left}, seed
        assert after[0] == 0, seed
        assert domains_of(after, places) == domains_of(order, places), seed
        for first in range(0, 72, 4):
            assert len({known[number].domain for number in after[first : first + 4]}) == 1, seed


def groups(order, size):
    return [{*order[first : first + size]} for first in range(0, len(order), size)]


def test_a_spare_of_the_same_domain_is_preferred():
    places = [
        NodePlace(0, "a"),
        NodePlace(1, "a"),
        NodePlace(2, "b"),
        NodePlace(3, "b"),
        NodePlace(4, "a"),
        NodePlace(5, "b"),
    ]
    before = [places[number] for number in order_nodes(places, [], (), 4)]
    assert [each.node_rank for each in before] == [0, 1, 4, 2]
    del places[2]
    assert order_nodes(places, before, (), 4) == [0, 1, 4, 3]
    before = [NodePlace(0, "a"), NodePlace(1, "a"), NodePlace(2, "b"), NodePlace(3, "b")]
    left = [NodePlace(0, "a"), NodePlace(1, "a"), NodePlace(3, "b"), NodePlace(4, "a"), NodePlace(5, "b")]
    assert order_nodes(left, before, (), 4) == [0, 1, 3, 5]


def test_a_node_that_failed_is_the_last_choice():
    before = [NodePlace(0, "a"), NodePlace(1, "a")]
    places = [*before, NodePlace(2, "b")]
    assert order_nodes(places, before, {1}, 2) == [0, 2]
    assert order_nodes(before, before, {1}, 2) == [0, 1]


def test_segments_that_cannot_be_kept():
    places = [
        NodePlace(0, "a"),
        NodePlace(1, "b"),
        NodePlace(2, "b"),
        NodePlace(3, "a"),
        NodePlace(4, "a"),
        NodePlace(5, ""),
    ]
    assert order_nodes(places, [], (), 6, 2) == [0, 3, 1, 2]
    assert order_nodes(places, [], (), 6, 3) == [0, 3, 4]
    assert order_nodes(places, [], (), 6, 4) == []
    assert describe_domains(places) == "a 3, b 2, 1 without"


def test_random_layouts_keep_domains_together_and_node_0_first():
    for seed in range(LAYOUTS):
        random = Random(seed)
        names = [f"d{number}" for number in range(random.randint(1, 5))] + [""] * (random.random() < 0.2)
        places = [NodePlace(number, random.choice(names)) for number in range(random.randint(1, 14))]
        segment, before = random.choice((1, 1, 2, 3)), []
        for _ in range(3):
            count = random.randint(1, len(places))
            failed = {each.node_rank for each in places[1:] if random.random() < 0.1}
            order = order_nodes(places, before, failed, count, segment)
            message = f"seed {seed}: {places} {before} {failed} {count} {segment}: {order}"
            runs = domains_of(order, places)
            assert len(runs) == len({*runs}), f"split, {message}"
            assert len({*order}) == len(order) <= count, message
            assert not order or order[0] == 0, message
            if segment == 1:
                assert len(order) == count, message
                stay = {each.node_rank for each in before} & {each.node_rank for each in places} - failed
                assert len(stay & {*order}) >= min(len(stay), count - (0 not in stay)), message
            for group in groups(order, segment):
                found = [each.domain for each in places if each.node_rank in group]
                assert len(found) == segment, message
                assert segment == 1 or (len({*found}) == 1 and found[0]), message
            known = {each.node_rank: each for each in places}
            before = [known[number] for number in order]
            places = [places[0], *(each for each in places[1:] if random.random() < 0.85)]
            places += [NodePlace(20 + number, random.choice(names)) for number in range(random.randint(0, 2))]
            places = list({each.node_rank: each for each in places}.values())


def joined(*domains, segment=None, given=False, **rules):
    """A job whose nodes have joined in this order, node 0 first."""
    job = Job(**{"min_nodes": len(domains), "max_nodes": len(domains), "segment": segment, **rules})
    job.start(job.hello(0, domain=domains[0]))
    for number, domain in enumerate(domains[1:], 1):
        job.admit(job.hello(number, domain=domain, has_node_rank=given))
    return job


def test_nodes_of_a_domain_get_contiguous_ranks():
    job = joined("a", "b", "a", "b")
    assert started(job) == [0, 2, 1, 3]
    assert "nodes with ranks by domain: a 2, b 2" in notes_of(job)


@pytest.mark.parametrize(("domains", "given"), [(("", "", ""), False), (("a", "b", "a"), True)])
def test_the_order_stays_without_domains_and_where_users_give_the_ranks(domains, given):
    job = joined(*domains, given=given)
    assert started(job) == [0, 1, 2]
    assert notes_of(job) == []


@pytest.mark.parametrize(("domains", "order"), [("abab", [0, 2, 1, 3]), (("", "", ""), [0, 1, 2])])
def test_nodes_that_are_numbered_are_ordered_on_request(domains, order):
    assert started(joined(*domains, given=True, node_order="topology")) == order


def test_a_lost_node_is_replaced_by_a_spare_of_its_domain():
    job = joined("a", "b", "a", "b", "a", "b", min_nodes=4, max_nodes=6, spares=2, given=True)
    assert started(job) == [0, 2, 4, 1]
    lose(job, 1, 0, 2, 4)
    assert started(job) == [0, 2, 4, 3]


def test_a_segment_that_would_be_split_is_refused():
    job = joined("a", "b", "a", "b", "b", "c", segment=2)
    (end,) = {message.outcome for _, message in job.sent if isinstance(message, messages.EndJob)}
    assert end.usage_error == (
        "--segment 2: 4 of 6 nodes are in whole groups of 2 in one domain",
        "domains: a 2, b 3, c 1; node 0 must be in such a group",
    )
    assert started(joined("a", "b", "a", "b", segment=2)) == [0, 2, 1, 3]


def test_a_job_ends_when_too_few_whole_segments_are_left():
    job = joined("a", "b", "a", "b", "c", segment=2, min_nodes=4, max_nodes=5, spares=1, given=True)
    assert started(job) == [0, 2, 1, 3]
    lose(job, 3, 0, 1, 2)
    (end,) = {message.outcome for _, message in job.sent if isinstance(message, messages.EndJob)}
    assert end.code == 69
    assert "--segment 2: 2 of 4 nodes are in whole groups" in end.remark


def test_a_node_without_which_no_whole_segment_is_left_cannot_be_left_out():
    """It would leave a job without ranks, which waits for ever."""
    job = joined("a", "a", "b", "b", segment=2, min_nodes=2, max_nodes=4, options=CHECKED)
    job.send(0, messages.CheckPassed(0))
    job.send(1, messages.NodeStartError("/dev/shm is full", "empty it"))
    (end,) = {message.outcome for _, message in job.sent if isinstance(message, messages.EndJob)}
    assert end.usage_error == (
        "node 1 (n1): /dev/shm is full; without it --segment 2: 0 of 2 nodes are in whole groups of 2 in one domain",
        "empty it",
    )
    other = joined("a", "a", "b", "b", segment=2, min_nodes=2, max_nodes=4, options=CHECKED)
    for number in (0, 1, 3):
        other.send(number, messages.CheckPassed(0))
    other.send(2, messages.NodeStartError("/dev/shm is full", "empty it"))
    assert started(other) == [0, 1]


def test_the_switch_that_slurm_names():
    assert (
        read_switch({"SLURM_TOPOLOGY_ADDR": "s0.s2.n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}) == "s0.s2"
    )
    assert read_switch({"SLURM_TOPOLOGY_ADDR": "n7.example", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ""
    assert read_switch({}) == ""


def test_which_domain_a_node_has():
    switch = {"SLURM_TOPOLOGY_ADDR": "s0.s2.n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    for given, fabrics, environ, expected in (
        ("rack-7", ["u.1"], switch, ("rack-7", "--domain")),
        (None, ["u.1", "u.1"], switch, ("u.1", "NVLink")),
        (None, ["u.1", "u.2"], switch, ("s0.s2", "SLURM_TOPOLOGY_ADDR")),
        (None, ["u.1", None], switch, ("s0.s2", "SLURM_TOPOLOGY_ADDR")),
        (None, [None], switch, ("s0.s2", "SLURM_TOPOLOGY_ADDR")),
    ):
        domain = find_domain(given, fabrics, environ)
        assert domain
        assert (domain.value, domain.source) == expected
    assert find_domain(None, [], {}) is None
    assert find_domain(None, [None], {}) is None


PRINTS_NODE = """
import os
print("node", os.environ["NODE_RANK"])
"""


@pytest.mark.usefixtures("state")
def test_nodes_of_one_nvlink_domain_get_contiguous_ranks(start_ddplaunch, run_in_fork, fake_nvml, tmp_path):
    """Four launchers on this machine, with the simulated GPUs of two racks in turn."""
    write_program(tmp_path, "train.py", PRINTS_NODE)
    where = ("--nnodes", "4", "--node-rank", "auto", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = (*where, "--run-id", "racks", "--start", "exec", "--segment", "2", "train.py")
    cliques = (1, 2, 1, 2)
    gpus = [fake_nvml.environ(1, fabrics=f"c0ffee00111122223333444455556666:{clique}:3") for clique in cliques]
    jobs = [start_ddplaunch("run", *words, env=env) for env in gpus]
    assert [job.wait() for job in jobs] == [0] * 4, jobs[0].stderr()
    nodes = [int(job.stdout().split()[-1]) for job in jobs]
    racks = {frozenset(number for number, clique in zip(nodes, cliques, strict=True) if clique == of) for of in (1, 2)}
    assert racks == {frozenset({0, 1}), frozenset({2, 3})}
    names = [f"c0ffee00-1111-2222-3333-444455556666.{clique}" for clique in (1, 2)]
    assert f"nodes with ranks by domain: {names[0]} 2, {names[1]} 2\n" in jobs[0].stderr()
    report = run_in_fork("report", "racks").stdout
    of_first, of_last = (names[cliques[nodes.index(number)] - 1] for number in (0, 3))
    assert f"  domain {of_first}: nodes 0-1\n  domain {of_last}: nodes 2-3\n" in report
    content = json.loads(run_in_fork("report", "racks", "--json").stdout)
    assert content["domain"] == of_first
    assert content["domains"] == [
        {"domain": of_first, "node_ranks": [0, 1]},
        {"domain": of_last, "node_ranks": [2, 3]},
    ]
