"""MVAPICH: ``mpirun_rsh`` sets MV2_COMM_WORLD_* (version 2) or MVP_COMM_WORLD_* (version 3 and later)."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import is_set, numbers, started

VERSIONS = (
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE"),
)
"""Rank, size, local rank and local size (3, 4, 1, 2): version 2's names, and those since."""


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that mpirun_rsh has started."""
    for names in VERSIONS:
        if is_set(environ, names[0]):
            rank, size, local_rank, local_size = numbers(environ, *names)
            return started("mvapich", names, rank, size, local_rank, local_size=local_size)
    return None
