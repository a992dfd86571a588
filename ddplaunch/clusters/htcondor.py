"""HTCondor: a node of a job in its parallel universe.

It numbers the nodes (src/condor_starter.V6.1/parallel_proc.cpp sets these two) and tells none where another is: a job's
script has to exchange that, as those in its examples do.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import counts_nodes, is_set, number, unaddressed

NNODES = "_CONDOR_NPROCS"  # 2
NODE_RANK = "_CONDOR_PROCNO"  # 1
ADDRESS = "MASTER_ADDR"  # 10.0.0.4, from the job's script
PORT = "MASTER_PORT"  # 29500, likewise


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job.

    Raises UsageError if there are several and the job's script does not say where the first is.
    """
    if not is_set(environ, NNODES, NODE_RANK):
        return None
    if number(environ, NNODES) > 1 and not is_set(environ, ADDRESS):
        raise unaddressed(environ, NNODES, NODE_RANK)
    return counts_nodes("htcondor", environ, NNODES, NODE_RANK, ADDRESS, PORT)
