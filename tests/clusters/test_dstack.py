"""dstack."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.dstack import find
from ddplaunch.errors import UsageError

NODE = {
    "DSTACK_RUN_NAME": "calm-otter-1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_GPUS_NUM": "16",
    "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.5",
}


def test_a_node() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.nproc) == (2, 1, "10.0.0.4", "8")
    other = find({**NODE, "DSTACK_RUN_NAME": "calm-otter-2"})
    assert other
    assert other.port != finding.port


def test_one_node_needs_no_address() -> None:
    alone = {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0", "DSTACK_GPUS_PER_NODE": "0", "DSTACK_MASTER_NODE_IP": ""}
    finding = find({**NODE, **alone})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.nproc) == (1, 0, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"DSTACK_NODE_RANK": "2"}, "DSTACK_NODE_RANK=2 and DSTACK_NODES_NUM=2 contradict"),
        ({"DSTACK_MASTER_NODE_IP": ""}, "DSTACK_MASTER_NODE_IP is not set"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**NODE, **changed})
