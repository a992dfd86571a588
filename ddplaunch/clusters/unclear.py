"""RANK and WORLD_SIZE without a known meaning: some systems count nodes with them, others processes.

To guess would start every machine's job alone, or a rank too many on each. No system of its own, so ``--cluster`` does
not name it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.reading import is_set
from ddplaunch.errors import UsageError

RANK, SIZE = "RANK", "WORLD_SIZE"
SIGNS = (RANK, SIZE, "MASTER_ADDR")
LOCAL_RANK = "LOCAL_RANK"


def check_unclear(environ: Mapping[str, str]) -> None:
    """Refuse to guess. Raises UsageError if they are set, and count more than one."""
    if not is_set(environ, *SIGNS) or is_set(environ, LOCAL_RANK) or environ[SIZE].strip() == "1":
        return
    raise UsageError(
        f"{RANK}={environ[RANK]} and {SIZE}={environ[SIZE]} without {LOCAL_RANK}: they count either nodes or processes",
        f'nodes: ddplaunch run --nnodes "${SIZE}" --node-rank "${RANK}" …; processes: set {LOCAL_RANK} in each\n'
        "neither: ddplaunch run --cluster none …, for this machine alone",
    )
