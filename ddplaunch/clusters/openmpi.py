"""Open MPI 4 and 5: each process has its rank in OMPI_COMM_WORLD_*, and no variable says which node it is on.

OMPI_COMM_WORLD_NODE_RANK is the rank *on* its node over all of the job's applications, and no index of nodes.
Meanings are those of ``man mpirun``, "Environment Variables". Where rank 0 is follows, in version 4, from what its
daemons tell each other, which is written nowhere and was seen on real hosts; in version 5 PMIx is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import is_set, number_if_set, numbers, on_hosts

RANK = "OMPI_COMM_WORLD_RANK"  # 3
SIZE = "OMPI_COMM_WORLD_SIZE"  # 4
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"  # 1; not the rank modulo anything: processes may be dealt in any order
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"  # 2
MAX_NODES = "OMPI_MCA_orte_num_nodes"  # 2, those given, used or not; version 4 only
OWN_HOST = "PMIX_HOSTNAME"  # n1
HOSTS = "OMPI_MCA_orte_node_regex"  # n[1:0-1],[2:10].77.0.12@0(3), of all daemons, mpirun's own first; not on its host
DAEMON = "OMPI_MCA_orte_local_daemon_uri"  # 726007808.2;tcp://10.77.0.12:46173, where 2 is its index in that list
NAMESPACE = "PMIX_NAMESPACE"  # 435355649 (version 4), prterun-n1-4711@1 (version 5)

JSRUN_RANK = "JSM_NAMESPACE_RANK"  # jsrun sets Open MPI's variables beside its own, which tell more


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that mpirun has started."""
    if not is_set(environ, RANK) or is_set(environ, JSRUN_RANK):
        return None
    names: tuple[str, ...] = (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)
    rank, size, local_rank, local_size = numbers(environ, *names)
    most_nodes = number_if_set(environ, MAX_NODES)
    address = _first_host(environ, rank, size, local_rank, most_nodes) if local_size < size else None
    hosts: tuple[str, ...] = ()
    if local_size < size and most_nodes is None:
        from ddplaunch.clusters import pmix

        hosts = pmix.ask(environ, size) or ()
        address = hosts[0] if hosts else None
    return on_hosts(
        "openmpi",
        (*names, OWN_HOST) if address else names,
        hosts,
        rank,
        size,
        local_rank,
        local_size,
        most_nodes=most_nodes,
        address=address,
        job=environ.get(NAMESPACE),
    )


def _first_host(environ: Mapping[str, str], rank: int, size: int, local_rank: int, used: int | None) -> str | None:
    """Return rank 0's host, as far as it follows: hosts are filled in their order, mpirun's own first if it is one.

    Where one host is idle, and others have several ranks, it is taken to be mpirun's own.
    """
    own, daemon = environ.get(OWN_HOST), re.match(r"\d+\.(\d+);", environ.get(DAEMON, ""))
    if own is None or daemon is None or used is None:
        return None
    if rank == local_rank:  # all lower ranks are here
        return own
    names, here = list(_names(environ.get(HOSTS, ""))), int(daemon[1])
    if not 0 < here < len(names):
        return None
    if used == len(names):
        return names[0]
    if size == used:  # one a node
        return names[here - rank] if rank <= here else None
    return names[1] if used == len(names) - 1 and here > 1 else None


def _names(text: str) -> Iterator[str]:
    """Read a list of hosts: ``prefix[digits:ranges]suffix`` or a plain name, separated by commas."""
    for prefix, digits, ranges, suffix in re.findall(
        r"([^\[\],@]*)(?:\[(\d+):([\d,-]+)\]([^\[\],@]*))?(?:,|$)", text.partition("@")[0]
    ):
        if not ranges:
            yield from [prefix] if prefix else []
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            for value in range(int(first), int(last or first) + 1):
                yield f"{prefix}{value:0{digits}}{suffix}"
