"""Vertex AI, and AI Platform Training before it: a machine of a custom PyTorch job.

RANK and WORLD_SIZE count machines there (cloud.google.com/ai-platform/training/docs/distributed-pytorch); one process
is started on each.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import counts_nodes, is_set

JOB = "CLOUD_ML_JOB_ID"  # 8217464138467901440
NODE_RANK = "RANK"  # 1
NNODES = "WORLD_SIZE"  # 2
ADDRESS = "MASTER_ADDR"  # cmle-training-workerpool0-d604929a6a-0
PORT = "MASTER_PORT"  # 2222
LOCAL_RANK = "LOCAL_RANK"  # never


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a machine of a job of several."""
    if not is_set(environ, JOB, NODE_RANK, NNODES, ADDRESS) or is_set(environ, LOCAL_RANK):
        return None
    return counts_nodes("vertexai", environ, NNODES, NODE_RANK, ADDRESS, PORT, run_id=environ[JOB], comes_late=True)
