"""Multi-node parallel jobs of AWS Batch."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.awsbatch import find
from ddplaunch.control.route import own_addresses
from ddplaunch.errors import UsageError
from tests.conftest import free_port, write

NODE = {
    "AWS_BATCH_JOB_ID": "1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e#1",
    "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
}
MAIN = {
    **NODE,
    "AWS_BATCH_JOB_ID": "1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e#0",
    "AWS_BATCH_JOB_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "",
}


def test_a_node() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.place) == (3, 1, "10.0.0.4", None)


def test_the_main_node_finds_its_own_address_and_the_job_its_port() -> None:
    main, node = find(MAIN), find(NODE)
    assert main
    assert node
    assert main.node_rank == 0
    assert main.address in {*own_addresses(), None}, "None on a machine without a network"
    assert (main.port, main.run_id) == (node.port, node.run_id)
    assert main.run_id == "1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e"


@pytest.mark.parametrize(("index", "node_rank"), [("2", 0), ("0", 1), ("1", 2)])
def test_ranks_are_counted_from_the_main_node(index: str, node_rank: int) -> None:
    finding = find({**NODE, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2", "AWS_BATCH_JOB_NODE_INDEX": index})
    assert finding
    assert finding.node_rank == node_rank


def test_any_other_job() -> None:
    assert find({"AWS_BATCH_JOB_ID": "1c2f5a5e", "AWS_BATCH_JOB_ARRAY_INDEX": "3"}) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"AWS_BATCH_JOB_NODE_INDEX": "3"}, "AWS_BATCH_JOB_NODE_INDEX=3 and AWS_BATCH_JOB_NUM_NODES=3 contradict"),
        ({"AWS_BATCH_JOB_MAIN_NODE_INDEX": ""}, "AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}, "PRIVATE_IPV4_ADDRESS is not set"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**NODE, **changed})


@pytest.mark.slow
def test_the_main_node_and_another_train_together(start, tmp_path) -> None:
    write(tmp_path, "train.py", "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    job = {"AWS_BATCH_JOB_NUM_NODES": "2", "MASTER_PORT": str(free_port())}
    words = ("run", "--nproc", "1", "--start", "exec", "train.py")
    main = start(*words, env={**MAIN, **job})
    address = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"}
    other = start(*words, env={**NODE, **job, **address})
    assert (main.wait(), other.wait()) == (0, 0), main.stderr() + other.stderr()
    assert "rank 0 of 2" in main.stdout()
    assert "rank 1 of 2" in other.stdout()
