"""Tests of detecting Open MPI 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ddplaunch.system.clusters import openmpi_pmix
from ddplaunch.system.clusters.cluster_env import RankAssignment
from ddplaunch.system.clusters.systems.rank_launchers import openmpi as system
from tests.system.clusters.recorded_environments import OPENMPI_4, openmpi, require_detected


def test_other_variables_are_not_open_mpi() -> None:
    assert system.detect({"OMPI_MCA_btl": "tcp", "PMIX_RANK": "0"}) is None


FOUND: list[tuple[Mapping[str, str], dict[str, Any]]] = [
    # version 4, and 5, on one host
    (
        OPENMPI_4,
        {
            "rank_assignment": RankAssignment(3, 4, 3, 4),
            "nnodes": 1,
            "node_rank": 0,
            "address": "127.0.0.1",
            "run_id": "435355649",
        },
    ),
    (openmpi(1, 2, 1, 2), {"rank_assignment": RankAssignment(1, 2, 1, 2), "run_id": "prterun-n1-4711@1"}),
    # ``mpirun --npernode 1``, and ``--map-by ppr:1:node`` of version 5: one process a node is a node
    (openmpi(2, 3, 0, 1), {"nnodes": 3, "node_rank": 2, "rank_assignment": None, "address": None}),
    # the variables of version 4 on two hosts; they do not say which one this is, nor whether all are used
    (
        {**openmpi(3, 4, 1, 2), "OMPI_MCA_orte_num_nodes": "2"},
        {"rank_assignment": RankAssignment(3, 4, 1, 2), "nnodes": None, "node_rank": None, "address": None},
    ),
    # alone on a node while others share theirs: three processes on at most two nodes cannot be one a node
    ({**openmpi(2, 3, 0, 1), "OMPI_MCA_orte_num_nodes": "2"}, {"rank_assignment": RankAssignment(2, 3, 0, 1)}),
    # OMPI_COMM_WORLD_NODE_RANK counts the processes on a node, and is no index of nodes
    *(({**openmpi(n, 4, n, 4), "OMPI_COMM_WORLD_NODE_RANK": str(n)}, {"node_rank": 0}) for n in range(4)),
    # a local rank is never the rank modulo anything: version 5, oversubscribed, gives rank 1 the local rank 2
    (openmpi(1, 4, 2, 4), {"rank_assignment": RankAssignment(1, 4, 2, 4)}),
]


@pytest.mark.parametrize(("environ", "expected"), FOUND)
def test_detected_cluster_environments(environ: Mapping[str, str], expected: Mapping[str, Any]) -> None:
    require_detected(system.detect(environ), **expected)


def test_all_processes_of_a_job_have_one_port_and_other_jobs_another() -> None:
    ports = {getattr(system.detect(openmpi(rank, 4, rank, 4)), "port", None) for rank in range(4)}
    assert len(ports) == 1
    other = system.detect(openmpi(0, 4, 0, 4, PMIX_NAMESPACE="prterun-n1-4712@1"))
    assert other
    assert other.port not in ports


VERSION_5 = [
    # rank, size, local rank, local size; where all ranks are; how many nodes, which one, whether it has one rank alone
    ((2, 3, 0, 1), ("n1", "n1", "n2"), (2, 1, True)),
    ((0, 3, 0, 1), ("n1", "n2", "n2"), (2, 0, True)),
    ((1, 4, 0, 2), ("n1", "n2", "n1", "n2"), (2, 1, True)),
    ((1, 2, 0, 1), ("n2", "n1"), (2, 1, False)),
    ((2, 3, 0, 1), None, (3, 2, False)),
    ((2, 3, 0, 1), ("n1", "n2", "n2"), (3, 2, False)),  # of another job: two are on its host
]


@pytest.mark.parametrize(("numbers", "hosts", "expected"), VERSION_5)
def test_hosts_from_pmix(
    numbers: tuple[int, int, int, int],
    hosts: tuple[str, ...] | None,
    expected: tuple[int, int, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openmpi_pmix, "query_hosts", lambda environ, size: hosts)
    cluster_env = system.detect(openmpi(*numbers))
    assert cluster_env
    assert (cluster_env.nnodes, cluster_env.node_rank, cluster_env.rank_assignment is not None) == expected
    assert cluster_env.address == (hosts[0] if hosts else None)


def test_pmix_is_asked_only_below_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-n1-4711@1")
    assert openmpi_pmix.query_hosts(openmpi(2, 3, 0, 1), 3) is None, "no process above this one has PMIx"
    monkeypatch.setattr(openmpi_pmix, "_find_library", lambda: "/nowhere/libpmix.so.2")
    assert openmpi_pmix.query_hosts(openmpi(2, 3, 0, 1), 3) is None
    monkeypatch.delenv("PMIX_NAMESPACE")
    assert openmpi_pmix.query_hosts(openmpi(2, 3, 0, 1), 3) is None


TO_N2_N1 = "n[1:0,2,1]@0(3)"
"""The daemons of ``mpirun --host n2,n1``, typed on n0, which comes first in any case."""

FIRST_HOSTS = [
    # host, its daemon, hosts listed, how many have ranks; rank, size, local rank, local size; where rank 0 is
    (("n2", 1, TO_N2_N1, 2), (0, 2, 0, 1), "n2"),
    (("n1", 2, TO_N2_N1, 2), (1, 2, 0, 1), "n2"),
    (("n0", 0, "", 3), (1, 4, 1, 2), "n0"),  # --host n2:1,n0:2,n1:1
    (("n2", 1, TO_N2_N1, 3), (2, 4, 0, 1), "n0"),
    (("n1", 2, TO_N2_N1, 3), (3, 4, 0, 1), "n0"),
    (("n1", 2, TO_N2_N1, 2), (2, 3, 0, 1), "n2"),  # --host n2:2,n1:1
    (("n2", 1, TO_N2_N1, 2), (1, 2, 0, 1), "n0"),  # --host n0:1,n2:1,n1:1 -np 2
    (("n2", 2, "n[1:0-1],[2:10].77.0.12@0(3)", 2), (1, 2, 0, 1), "n1"),
    (("b", 2, "head,gpu[2:09-10].cl,b@0(4)", 2), (1, 2, 0, 1), "gpu09.cl"),
    (("n1", 1, "n[1:0-2]@0(3)", 2), (2, 4, 1, 2), None),  # --rank-by node, or n0 has the first two
    (("n3", 3, "n[1:0-4]@0(5)", 2), (2, 4, 0, 2), None),
    (("n1", 2, "", 2), (1, 2, 0, 1), None),
    (("n1", 2, "n[", 2), (1, 2, 0, 1), None),
]


@pytest.mark.parametrize(("where", "numbers", "first"), FIRST_HOSTS)
def test_where_rank_0_is(where: tuple[str, int, str, int], numbers: tuple[int, int, int, int], first: str) -> None:
    """The variables were recorded in processes of real jobs of version 4."""
    host, daemon, listed, used = where
    more = {
        "PMIX_HOSTNAME": host,
        "OMPI_MCA_orte_local_daemon_uri": f"726007808.{daemon};tcp://10.77.0.12:46173",
        "OMPI_MCA_orte_node_regex": listed,
        "OMPI_MCA_orte_num_nodes": str(used),
    }
    require_detected(system.detect({**openmpi(*numbers), **more}), address=first)


def test_jsrun_is_left_to_lsf() -> None:
    assert system.detect({**openmpi(1, 4, 1, 2), "JSM_NAMESPACE_RANK": "1"}) is None
