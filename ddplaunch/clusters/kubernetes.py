"""Kubernetes without an operator: a pod of an indexed Job, alone or in a JobSet.

Kubernetes tells a pod its index and no more; how many there are and where the first is stand in variables that the
Job's template sets.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF, a_copy, check_below, is_set, number, number_if_set, text, to_number
from ddplaunch.errors import UsageError

INDEX = "JOB_COMPLETION_INDEX"  # 1
NNODES = "DDPLAUNCH_NNODES"  # 2, or 2:4
ADDRESS = "MASTER_ADDR"  # job-0.job
PORT = "MASTER_PORT"  # 29500


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a pod of an indexed Job; where its size is not told it is one of many jobs, as is usual without us."""
    if not is_set(environ, INDEX):
        return None
    if not is_set(environ, NNODES):
        return a_copy("kubernetes", environ, INDEX, NNODES, "pod")
    lowest, colon, highest = text(environ, NNODES).partition(":")
    nnodes, node_rank = to_number(highest if colon else lowest, NNODES), number(environ, INDEX)
    min_nodes = to_number(lowest, NNODES) if colon else None
    if min_nodes is not None and not 1 <= min_nodes <= nnodes:
        raise UsageError(f"{NNODES}={environ[NNODES]} is not a range like 2:4", OFF)
    check_below(node_rank, nnodes, INDEX, NNODES)
    return Finding(
        "kubernetes",
        (INDEX, NNODES, ADDRESS),
        nnodes=nnodes,
        node_rank=node_rank,
        min_nodes=min_nodes,
        address=text(environ, ADDRESS) if nnodes > 1 else environ.get(ADDRESS) or None,
        address_comes_late=True,
        port=number_if_set(environ, PORT) if nnodes > 1 else None,  # it may be that of a Service called master
    )
