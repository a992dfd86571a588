"""SkyPilot: a node of a task; it starts the same commands on all of them."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import check_below, contradiction, is_set, job_port, number, number_if_set

IPS = "SKYPILOT_NODE_IPS"  # one address a line, node 0's first
NODE_RANK = "SKYPILOT_NODE_RANK"  # 1
NNODES = "SKYPILOT_NUM_NODES"  # 2
GPUS = "SKYPILOT_NUM_GPUS_PER_NODE"  # 8
TASK = "SKYPILOT_TASK_ID"  # sky-2024-05-01-12-00-00-000000_mycluster_task-name_7


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a task."""
    if not is_set(environ, IPS):
        return None
    addresses = environ[IPS].split()
    nnodes = number_if_set(environ, NNODES)
    if nnodes not in (None, len(addresses)):
        raise contradiction(f"{NNODES}={nnodes}", f"{IPS}={','.join(addresses)} (nodes: {len(addresses)})")
    node_rank = number(environ, NODE_RANK)
    check_below(node_rank, len(addresses), NODE_RANK, f"addresses in {IPS}")
    gpus, task = number_if_set(environ, GPUS), environ.get(TASK) or None
    return Finding(
        "skypilot",
        (IPS, NODE_RANK),
        nnodes=len(addresses),
        node_rank=node_rank,
        address=addresses[0],
        port=job_port(task) if task else None,
        run_id=task,
        nproc=str(gpus) if gpus else None,
    )
