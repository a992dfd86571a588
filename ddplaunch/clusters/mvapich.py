"""MVAPICH: ``mpirun_rsh`` sets MV2_COMM_WORLD_* (version 2) or MVP_COMM_WORLD_* (version 3 and later)."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import is_set, number, started

PREFIXES = ("MV2_COMM_WORLD", "MVP_COMM_WORLD")
RANK = "RANK"  # 3
SIZE = "SIZE"  # 4
LOCAL_RANK = "LOCAL_RANK"  # 1
LOCAL_SIZE = "LOCAL_SIZE"  # 2


def find(environ: Mapping[str, str]) -> Finding | None:
    """Tell of a process that mpirun_rsh has started.

    Raises:
        UsageError: a variable is missing, is no number, or contradicts another.
    """
    for prefix in PREFIXES:
        rank, size, local_rank, local_size = names = tuple(
            f"{prefix}_{name}" for name in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)
        )
        if is_set(environ, rank):
            return started(
                "mvapich",
                names,
                rank=number(environ, rank),
                size=number(environ, size),
                local_rank=number(environ, local_rank),
                local_size=number(environ, local_size),
            )
    return None
