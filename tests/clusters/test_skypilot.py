"""SkyPilot."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.skypilot import find
from ddplaunch.errors import UsageError

NODE = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2024-05-01-12-00-00-000000_mycluster_train_7",
}


def test_a_node() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.nproc) == (2, 1, "10.0.0.4", "8")
    other = find({**NODE, "SKYPILOT_TASK_ID": "sky-2024-05-01-12-00-00-000000_mycluster_train_8"})
    assert other
    assert other.port != finding.port


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SKYPILOT_NUM_NODES": "3"}, r"SKYPILOT_NUM_NODES=3 and SKYPILOT_NODE_IPS=10.0.0.4,10.0.0.5 \(nodes: 2\)"),
        ({"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2 and addresses in SKYPILOT_NODE_IPS=2"),
        ({"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not set"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**NODE, **changed})
