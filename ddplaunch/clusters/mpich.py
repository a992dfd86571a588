"""MPICH and Intel MPI, whose launcher is Hydra.

PMI_RANK alone does not show it: ``srun --mpi=pmi2``, Flux and PALS set that too. Hydra's own are MPI_LOCALRANKID and
MPI_LOCALNRANKS (``src/pm/hydra/proxy`` of MPICH). No variable tells of other hosts, so Hydra is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import agreed, is_set, numbers, on_hosts

RANK = "PMI_RANK"  # 3
PMIX_RANK = "PMIX_RANK"  # 3, where PMIx is used beside it
SIZE = "PMI_SIZE"  # 4
LOCAL_RANK = "MPI_LOCALRANKID"  # 1
LOCAL_SIZE = "MPI_LOCALNRANKS"  # 2
JOB = "I_MPI_HYDRA_UUID"  # 06000000-8ac7-aeff-ce60-0600efd0d56e, alike on all hosts; Intel's only

# Where Slurm starts Hydra's daemons as a step with PMIx, all of a node have their daemon's PMIX_RANK.
SLURM_STEP_ID = "SLURM_STEP_ID"


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that mpiexec.hydra has started."""
    if not is_set(environ, RANK, LOCAL_RANK):
        return None
    ranks = (RANK,) if is_set(environ, SLURM_STEP_ID) else (RANK, PMIX_RANK)
    names = (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)
    rank = agreed(environ, *ranks)
    size, local_rank, local_size = numbers(environ, *names[1:])
    job = environ.get(JOB)
    hosts: tuple[int, ...] = ()
    address = None
    if local_size < size:
        from ddplaunch.clusters import pmi

        if said := pmi.ask(environ, rank, size):
            hosts, address, job = said.hosts, said.first, job or said.name
    return on_hosts("mpich", names, hosts, rank, size, local_rank, local_size, address=address, job=job)
