"""PAI DLC of Alibaba Cloud, and AIHC of Baidu: a node of a PyTorch job.

RANK and WORLD_SIZE count nodes there, beside NPROC_PER_NODE, the GPUs of a node ("General environment variables" in the
manuals of both: alibabacloud.com/help/en/pai/general-environment-variables, cloud.baidu.com/doc/AIHC/s/mm346i20k).
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import counts_nodes, is_set

NPROC = "NPROC_PER_NODE"  # 8
NODE_RANK = "RANK"  # 1
NNODES = "WORLD_SIZE"  # 2
ADDRESS = "MASTER_ADDR"  # dlc18isgeayd-master-0
PORT = "MASTER_PORT"  # 23456
LOCAL_RANK = "LOCAL_RANK"  # never


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job."""
    if not is_set(environ, NPROC, NODE_RANK, NNODES, ADDRESS) or is_set(environ, LOCAL_RANK):
        return None
    return counts_nodes("pai", environ, NNODES, NODE_RANK, ADDRESS, PORT, nproc=NPROC, comes_late=True)
