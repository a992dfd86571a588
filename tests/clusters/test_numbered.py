"""Systems that are a row each: their variables number the nodes."""

from __future__ import annotations

import pytest

from ddplaunch.clusters import find
from ddplaunch.clusters.numbered import ROWS
from ddplaunch.errors import UsageError

NODES = {
    "dstack": {
        "DSTACK_RUN_NAME": "calm-otter-1",
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_GPUS_NUM": "16",
        "DSTACK_MASTER_NODE_IP": "10.0.0.4",
        "DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.5",
    },
    "runpod": {
        "PRIMARY_ADDR": "10.0.0.4",
        "PRIMARY_PORT": "29400",
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "29400",
        "NODE_ADDR": "10.0.0.5",
        "NODE_RANK": "1",
        "NUM_NODES": "2",
        "NUM_TRAINERS": "8",
        "HOST_NODE_ADDR": "10.0.0.4:29400",
        "WORLD_SIZE": "16",
    },
    "beaker": {
        "BEAKER_REPLICA_COUNT": "2",
        "BEAKER_REPLICA_RANK": "1",
        "BEAKER_LEADER_REPLICA_HOSTNAME": "10.0.0.4",
    },
    "leaderworkerset": {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "10.0.0.4",
    },
    "ngc": {
        "NGC_JOB_ID": "4711",
        "NGC_ARRAY_SIZE": "2",
        "NGC_ARRAY_INDEX": "1",
        "NGC_MASTER_ADDR": "10.0.0.4",
        "NGC_GPUS_PER_NODE": "8",
    },
}
"""As their manuals tell, but for the addresses."""


@pytest.mark.parametrize("name", ROWS)
def test_a_node_of_two(name: str) -> None:
    finding = find(NODES[name])
    assert finding
    assert (finding.cluster, finding.nnodes, finding.node_rank, finding.address) == (name, 2, 1, "10.0.0.4")
    assert finding.nproc == ("8" if ROWS[name].nproc else None)
    assert (finding.place, finding.is_copy) == (None, False)


@pytest.mark.parametrize("name", ROWS)
def test_one_node_needs_no_address(name: str) -> None:
    row = ROWS[name]
    finding = find({**NODES[name], row.nnodes: "1", row.node_rank: "0", row.address: ""}, name)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address) == (1, 0, None)


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be(name: str) -> None:
    row = ROWS[name]
    with pytest.raises(UsageError, match=f"{row.node_rank}=2 and {row.nnodes}=2 contradict"):
        find({**NODES[name], row.node_rank: "2"})
    with pytest.raises(UsageError, match=f"{row.node_rank} is not set"):
        find({**NODES[name], row.node_rank: "", row.address: ""})


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.copies])
def test_several_need_an_address(name: str) -> None:
    row = ROWS[name]
    with pytest.raises(
        UsageError, match=f"{row.node_rank}=1 of {row.nnodes}=2 nodes, but nothing says where"
    ) as raised:
        find({**NODES[name], row.address: ""})
    assert f'--nnodes "${row.nnodes}" --node-rank "${row.node_rank}"' in str(raised.value.hint)


def test_replicas_of_beaker_without_a_leader_are_jobs_of_their_own() -> None:
    finding = find({**NODES["beaker"], "BEAKER_LEADER_REPLICA_HOSTNAME": ""})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.is_copy) == (1, 0, True)
    assert finding.notes == (
        "BEAKER_REPLICA_RANK=1 without BEAKER_LEADER_REPLICA_HOSTNAME: this replica is treated as a job of its own",
    )


def test_port_and_run_id_are_the_jobs() -> None:
    dstack, other = find(NODES["dstack"]), find({**NODES["dstack"], "DSTACK_RUN_NAME": "calm-otter-2"})
    assert dstack
    assert other
    assert dstack.run_id == "calm-otter-1"
    assert dstack.port != other.port
    runpod = find(NODES["runpod"])
    assert runpod
    assert runpod.port == 29400


def test_a_count_of_no_gpus_says_nothing() -> None:
    finding = find({**NODES["dstack"], "DSTACK_GPUS_PER_NODE": "0"})
    assert finding
    assert finding.nproc is None


@pytest.mark.parametrize("name", ROWS)
def test_each_has_a_source(name: str) -> None:
    assert "." in ROWS[name].source or "NVIDIA" in ROWS[name].source
