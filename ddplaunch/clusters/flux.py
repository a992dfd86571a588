"""Flux: a task of ``flux run`` or ``flux submit``.

The script of ``flux batch`` and the shell of ``flux alloc`` have none of these variables: the broker clears them.
Names are those of ``man flux-environment``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import is_set, numbers, started, text

JOB_ID = "FLUX_JOB_ID"  # ƒ2WzFTu3ry1 or f2WzFTu3ry1
RANK = "FLUX_TASK_RANK"  # 3
SIZE = "FLUX_JOB_SIZE"  # 4
NNODES = "FLUX_JOB_NNODES"  # 2; each has one task or more
LOCAL_RANK = "FLUX_TASK_LOCAL_ID"  # 1


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a task that Flux has started."""
    if not is_set(environ, RANK):
        return None
    names = (RANK, SIZE, LOCAL_RANK, NNODES)
    rank, size, local_rank, nnodes = numbers(environ, *names)
    return started("flux", names, rank, size, local_rank, nnodes=nnodes, job=text(environ, JOB_ID))
