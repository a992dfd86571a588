"""NNODES, NODE_RANK and MASTER_ADDR, as people and platforms set them for scripts that start torchrun with them.

LLaMA-Factory and ms-swift document them for their users; NUM_NODES is of RunPod's and others, NODE_COUNT of the jobs of
Oracle's Data Science (oracle/accelerated-data-science, ads/jobs). The names leave no doubt that nodes are counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import agreed, counts_nodes, is_set

COUNTS = ("NNODES", "NUM_NODES", "NODE_COUNT")  # 2
NODE_RANK = "NODE_RANK"  # 1
ADDRESS = "MASTER_ADDR"  # 10.0.0.4
PORT = "MASTER_PORT"  # 29500
NPROC = "NPROC_PER_NODE"  # 8, auto, gpu, cpu


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of several.

    Raises UsageError if NODE_RANK is missing, a variable is not a number, or contradicts another.
    """
    nnodes = next((name for name in COUNTS if is_set(environ, name)), None)
    if nnodes is None or not is_set(environ, ADDRESS) or agreed(environ, *COUNTS) < 2:
        return None
    return counts_nodes("nodes", environ, nnodes, NODE_RANK, ADDRESS, PORT, nproc=NPROC)
