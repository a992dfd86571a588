"""A job of ``ddplaunch submit`` whose script numbers its hosts, as Grid Engine, PBS and LSF number nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import check_below, is_set, job_port, number

HOSTS = "DDPLAUNCH_HOSTS"  # n1,n2; each once, node 0's first
NODE_RANK = "DDPLAUNCH_NODE_RANK"  # 1


def find(cluster: str, environ: Mapping[str, str], job_id: str, index: str) -> Finding | None:
    """Recognise a node of such a job; the variables ``job_id`` and ``index`` have its number, and that in an array.

    Raises UsageError if the node rank is not a number, or there are not so many hosts.
    """
    if not is_set(environ, job_id, HOSTS, NODE_RANK):
        return None
    hosts, job = environ[HOSTS].split(","), re.sub(r"\[\d+\]", "", environ[job_id])
    digits, dot, server = job.partition(".")
    if (which := environ.get(index, "")).isdecimal() and (which != "0" or "[" in environ[job_id]):
        job = f"{digits}_{which}{dot}{server}"
    node_rank = number(environ, NODE_RANK)
    check_below(node_rank, len(hosts), NODE_RANK, f"hosts in {HOSTS}")
    variables = (job_id, HOSTS, NODE_RANK)
    return Finding(cluster, variables, len(hosts), node_rank, address=hosts[0], port=job_port(job), run_id=job)
