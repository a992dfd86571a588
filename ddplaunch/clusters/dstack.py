"""dstack: a node of a distributed task.

The variables are those of dstack.ai/docs/concepts/tasks, "System environment variables".
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import counts_nodes, is_set

NNODES = "DSTACK_NODES_NUM"  # 2
NODE_RANK = "DSTACK_NODE_RANK"  # 1
ADDRESS = "DSTACK_MASTER_NODE_IP"  # 10.0.0.4
GPUS = "DSTACK_GPUS_PER_NODE"  # 8
RUN = "DSTACK_RUN_NAME"  # calm-otter-1; dstack lets no other run of a project have it at the same time


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a task."""
    if not is_set(environ, NNODES):
        return None
    run = environ.get(RUN) or None
    return counts_nodes("dstack", environ, NNODES, NODE_RANK, ADDRESS, None, nproc=GPUS, run_id=run)
