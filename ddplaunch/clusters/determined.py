"""Determined: a container of a trial, told by a file that is there before the trial's own program starts.

The file is that of ``harness/determined/_info.py``, whose ``get_cluster_info()`` has its fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF, check_below, is_set, job_port
from ddplaunch.errors import UsageError
from ddplaunch.files import read_regular

ALLOCATION = "DET_ALLOCATION_ID"  # 1.6f1c1a3e-2f6b-4a7e-9d5f-0d9d3a0c8f51.1
FILE = "/run/determined/info/rendezvous.json"  # container_addrs, in the order of their ranks, and container_rank

MAX_BYTES = 1 << 20


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a container of a trial; notebooks and commands have one, and no such file.

    Raises UsageError if the file is not as it should be.
    """
    if not is_set(environ, ALLOCATION):
        return None
    try:
        rendezvous = json.loads(read_regular(FILE, MAX_BYTES))
        hosts, node_rank = [str(host) for host in rendezvous["container_addrs"]], int(rendezvous["container_rank"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{FILE} does not say which container this is", OFF) from None
    check_below(node_rank, len(hosts), "container_rank", "container_addrs")
    job = environ[ALLOCATION]
    return Finding(
        "determined",
        (ALLOCATION, FILE),
        nnodes=len(hosts),
        node_rank=node_rank,
        address=hosts[0],
        port=job_port(job),
        run_id=job,
    )
