"""HPE's PALS, the ``mpiexec`` of Cray systems under PBS.

It sets PMI's variables beside its own. ``srun --mpi=cray_shasta`` sets PALS's too; there Slurm's tell more.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import agreed, is_set, number_if_set, numbers, started

LOCAL_RANK = "PALS_LOCAL_RANKID"  # 1
LOCAL_SIZE = "PALS_LOCAL_SIZE"  # 2
RANKS = ("PALS_RANKID", "PMI_RANK", "PMIX_RANK")  # 3
SIZE = "PMI_SIZE"  # 4
NODE_RANK = "PALS_NODEID"  # 1
APPLICATION = "PALS_APID"  # 6f1c1a3e-2f6b-4a7e-9d5f-0d9d3a0c8f51

SLURM_STEP_ID = "SLURM_STEP_ID"


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that PALS has started."""
    if not is_set(environ, LOCAL_RANK) or is_set(environ, SLURM_STEP_ID):
        return None
    return started(
        "pals",
        tuple(name for name in (*RANKS, SIZE, LOCAL_RANK, LOCAL_SIZE, NODE_RANK) if is_set(environ, name)),
        agreed(environ, *RANKS),
        *numbers(environ, SIZE, LOCAL_RANK),
        local_size=number_if_set(environ, LOCAL_SIZE),
        node_rank=number_if_set(environ, NODE_RANK),
        job=environ.get(APPLICATION),
    )
