"""submitit's local executor, which starts the tasks of one machine; those that it has Slurm start are a Slurm step's.

SUBMITIT_LOCAL_* are set by ``submitit/local/local.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import numbers, started

EXECUTOR = "SUBMITIT_EXECUTOR"  # local, slurm, debug
JOB_ID = "SUBMITIT_LOCAL_JOB_ID"  # 4711, a process's number
RANK = "SUBMITIT_LOCAL_GLOBALID"  # 1
SIZE = "SUBMITIT_LOCAL_NTASKS"  # 2
LOCAL_RANK = "SUBMITIT_LOCAL_LOCALID"  # 1
NNODES = "SUBMITIT_LOCAL_JOB_NUM_NODES"  # 1


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a task of the local executor."""
    if environ.get(EXECUTOR) != "local":
        return None
    names = (EXECUTOR, RANK, SIZE, LOCAL_RANK)
    job, rank, size, local_rank, nnodes = numbers(environ, JOB_ID, RANK, SIZE, LOCAL_RANK, NNODES)
    return started("submitit", names, rank, size, local_rank, nnodes=nnodes, job=job)
