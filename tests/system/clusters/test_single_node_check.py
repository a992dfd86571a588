"""Tests of the check for a job of one machine that may be a node of several."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters import detect
from ddplaunch.system.clusters.single_node_check import check_single_node
from tests.system.clusters.recorded_environments import KUBERNETES, SLURM_BATCH

OTHER, OWN, UNKNOWN = "10.0.0.4", "n1", "gone.example"

HERE = {OWN: True, OTHER: False, UNKNOWN: None}


def check(environ: Mapping[str, str], ranks: int = 8) -> str | None:
    """Check for a node of several, after cluster detection has found none."""
    cluster_env = detect(environ)
    assert cluster_env is None or cluster_env.is_batch_script or cluster_env.may_be_single, "a system has decided"
    return check_single_node(environ, ranks, cluster_env, HERE.__getitem__)


REFUSED = [
    # the environment; the variables that the message names, and the options for every node
    ({"NODE_RANK": "1", "MASTER_ADDR": OTHER},  # Lightning's studios
     "NODE_RANK=1, MASTER_ADDR=10.0.0.4",
     '--nnodes N --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'),
    ({"NODE_RANK": "0", "MASTER_ADDR": OWN},
     "NODE_RANK=0, MASTER_ADDR=n1",
     '--nnodes N --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'),
    ({"NODE_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": OTHER, "MASTER_PORT": "29500"},  # MosaicML's
     "NODE_RANK=1, WORLD_SIZE=16, MASTER_ADDR=10.0.0.4",
     '--nnodes 2 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'),
    ({"NODE_RANK": "0", "WORLD_SIZE": "4"},  # fewer than start here: it may count nodes
     "NODE_RANK=0",
     '--nnodes N --node-rank "$NODE_RANK" --master-addr HOST'),
    ({"MACHINE_RANK": "0"},
     "MACHINE_RANK=0",
     '--nnodes N --node-rank "$MACHINE_RANK" --master-addr HOST'),
    ({"GROUP_RANK": "x"},
     "GROUP_RANK=x",
     '--nnodes N --node-rank "$GROUP_RANK" --master-addr HOST'),
    ({"NNODES": "2", "NODE_RANK": "1"},
     "NODE_RANK=1, NNODES=2",
     '--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr HOST'),
    ({"NUM_NODES": "2"},
     "NUM_NODES=2",
     '--nnodes "$NUM_NODES" --node-rank I --master-addr HOST'),
    ({"NNODES": "1", "NODE_RANK": "1", "MASTER_ADDR": OTHER},
     "NODE_RANK=1, NNODES=1, MASTER_ADDR=10.0.0.4",
     '--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'),
    ({"WORLD_SIZE": "16"},
     "WORLD_SIZE=16",
     "--nnodes 2 --node-rank I --master-addr HOST"),
    ({"WORLD_SIZE": "12", "MASTER_ADDR": UNKNOWN},
     "WORLD_SIZE=12, MASTER_ADDR=gone.example",
     '--nnodes N --node-rank I --master-addr "$MASTER_ADDR"'),
    ({"MASTER_ADDR": OTHER},
     "MASTER_ADDR=10.0.0.4",
     '--nnodes N --node-rank I --master-addr "$MASTER_ADDR"'),
    ({"TORCHX_RANK0_HOST": OTHER, "TORCHX_JOB_ID": "local://train"},
     "TORCHX_RANK0_HOST=10.0.0.4",
     '--nnodes N --node-rank I --master-addr "$TORCHX_RANK0_HOST"'),
    ({"NSML_WORLD_SIZE": "2", "NSML_RANK": "0", "NSML_HOST_RANK0": OWN},
     "NSML_RANK=0, NSML_WORLD_SIZE=2, NSML_HOST_RANK0=n1",
     '--nnodes "$NSML_WORLD_SIZE" --node-rank "$NSML_RANK" --master-addr "$NSML_HOST_RANK0"'),
    ({"ARNOLD_WORKER_NUM": "2", "ARNOLD_ID": "1", "ARNOLD_WORKER_0_HOST": OTHER},
     "ARNOLD_ID=1, ARNOLD_WORKER_NUM=2, ARNOLD_WORKER_0_HOST=10.0.0.4",
     '--nnodes "$ARNOLD_WORKER_NUM" --node-rank "$ARNOLD_ID" --master-addr "$ARNOLD_WORKER_0_HOST"'),
    ({"HOST_NUM": "2", "INDEX": "1", "CHIEF_IP": OTHER, "HOST_GPU_NUM": "8"},  # Taiji
     "HOST_NUM=2, CHIEF_IP=10.0.0.4",
     '--nnodes "$HOST_NUM" --node-rank I --master-addr "$CHIEF_IP"'),
    ({**KUBERNETES, "JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "job-0.job"},  # a JobSet's
     "JOB_COMPLETION_INDEX=0, MASTER_ADDR=job-0.job",
     '--nnodes N --node-rank "$JOB_COMPLETION_INDEX" --master-addr "$MASTER_ADDR"'),
    ({**SLURM_BATCH, "NODE_RANK": "1"},  # by pdsh, from a job's script
     "NODE_RANK=1",
     '--nnodes N --node-rank "$NODE_RANK" --master-addr HOST'),
]  # fmt: skip


LACKING = {"--nnodes N ": "the number of nodes", "--node-rank I ": "the node rank", "addr HOST": "node 0's address"}
"""What stands in the options for a value that no variable has, and how the message asks for it; the first counts."""


@pytest.mark.parametrize(("environ", "variables", "options"), REFUSED)
def test_several_nodes_are_refused(environ: Mapping[str, str], variables: str, options: str) -> None:
    with pytest.raises(UsageError) as raised:
        check(environ)
    unknown = next((what for sign, what in LACKING.items() if sign in options), "")
    reason = f", but no variable has {unknown}" if unknown else ""
    assert raised.value.message == f"{variables}: this may be one node of several{reason}"
    assert raised.value.hint == (
        f"on every node: ddplaunch run {options} …\nthis machine alone: ddplaunch run --standalone …, or --cluster none"
    )


LEFT = {
    "nothing": {},
    "a world of one": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "", "MASTER_ADDR": OTHER, "MASTER_PORT": "29500"},
    "a world of one, and its node": {"NODE_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": OTHER},
    "one node": {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": OTHER, "MASTER_PORT": "29500"},
    "one node of RunPod's": {"NUM_NODES": "1", "NODE_RANK": "0", "WORLD_SIZE": "8"},
    "one node of MosaicML's": {"NODE_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": OTHER},
    "as many as start here": {"WORLD_SIZE": "8"},
    "mp.spawn": {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355", "WORLD_SIZE": "16"},
    "mp.spawn, its node": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12355", "WORLD_SIZE": "16", "NODE_RANK": "0"},
    "this machine": {"MASTER_ADDR": OWN, "MASTER_PORT": "29500"},
    "a port": {"MASTER_PORT": "29500"},
    "a job's script": {**SLURM_BATCH, "MASTER_ADDR": OTHER, "WORLD_SIZE": "16"},
    "one of many pods": {**KUBERNETES, "JOB_COMPLETION_INDEX": "7"},
    "one of many pods, as if alone": {**KUBERNETES, "JOB_COMPLETION_INDEX": "7", "MASTER_ADDR": "localhost"},
}


@pytest.mark.parametrize("name", LEFT)
def test_single_machines_are_accepted(name: str) -> None:
    assert check(LEFT[name]) is None


def test_an_unknown_master_addr_is_named() -> None:
    expected = "MASTER_ADDR=gone.example cannot be resolved and is not used: this job has one node"
    assert check({"MASTER_ADDR": UNKNOWN, "MASTER_PORT": "29500"}) == expected
