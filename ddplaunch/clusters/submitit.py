"""submitit's local executor, which starts the tasks of one machine; those that it has Slurm start are a Slurm step's.

SUBMITIT_LOCAL_* are set by ``submitit/local/local.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import job_port, number, started

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
    job = number(environ, JOB_ID)
    return started(
        "submitit",
        (EXECUTOR, RANK, SIZE, LOCAL_RANK),
        rank=number(environ, RANK),
        size=number(environ, SIZE),
        local_rank=number(environ, LOCAL_RANK),
        nnodes=number(environ, NNODES),
        port=job_port(job),
        run_id=str(job),
    )
