"""Open MPI 4 and 5: each process has its rank in OMPI_COMM_WORLD_*, and nobody tells it which node it is on.

OMPI_COMM_WORLD_NODE_RANK is the rank *on* its node over all of the job's applications, and no index of nodes.
Meanings are those of ``man mpirun``, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import is_set, job_port, number, number_if_set, started

RANK = "OMPI_COMM_WORLD_RANK"  # 3
SIZE = "OMPI_COMM_WORLD_SIZE"  # 4
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"  # 1; not the rank modulo anything: processes may be dealt in any order
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"  # 2
MOST_NODES = "OMPI_MCA_orte_num_nodes"  # 2, those given, used or not; version 4 only
NAMESPACE = "PMIX_NAMESPACE"  # 435355649 (version 4), prterun-n1-4711@1 (version 5)

JSRUN_RANK = "JSM_NAMESPACE_RANK"
"""jsrun sets Open MPI's variables beside its own, which tell more."""


def find(environ: Mapping[str, str]) -> Finding | None:
    """Tell of a process that mpirun has started.

    Raises:
        UsageError: a variable is missing, is no number, or contradicts another.
    """
    if not is_set(environ, RANK) or is_set(environ, JSRUN_RANK):
        return None
    namespace = environ.get(NAMESPACE) or None
    return started(
        "openmpi",
        (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE),
        rank=number(environ, RANK),
        size=number(environ, SIZE),
        local_rank=number(environ, LOCAL_RANK),
        local_size=number(environ, LOCAL_SIZE),
        most_nodes=number_if_set(environ, MOST_NODES),
        port=job_port(namespace) if namespace else None,
        run_id=namespace,
    )
