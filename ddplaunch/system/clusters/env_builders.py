"""Helpers for systems: build a cluster environment for a node, a batch script or a started rank; read host files."""

from __future__ import annotations

import errno
import socket
import zlib
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.base.safe_files import MAX_HOSTFILE_BYTES, read_regular_file
from ddplaunch.system.clusters.cluster_env import Allocation, ClusterEnv, RankAssignment
from ddplaunch.system.clusters.env_variables import IGNORE_HINT, EnvVariables, check_below, contradiction_error
from ddplaunch.system.plan.rendezvous import LOOPBACK

NPROC_KEYWORDS = ("auto", "gpu", "cpu")  # values of `--nproc` other than a number
ROUTE_PROBE_ADDRESS = ("192.0.2.1", 9)  # in a network for documentation (RFC 5737)
FIRST_PORT, PORT_PAIR_COUNT = 15000, 8000
"""Ports of jobs: 15000 to 30999, below Linux's ephemeral ports (32768 and up), in pairs: store and control port."""


def missing_address_error(environ: EnvVariables, nnodes: str, node_rank: str) -> UsageError:
    """Build the error for variables ``nnodes`` and ``node_rank`` that are set while none has node 0's address."""
    return UsageError(
        f"{node_rank}={environ[node_rank]} of {nnodes}={environ[nnodes]} nodes, but no variable has node 0's address",
        f'ddplaunch run --nnodes "${nnodes}" --node-rank "${node_rank}" --master-addr … on every node\n'
        "or --cluster none …, for this machine alone",
    )


def port_for_job(job: int | str) -> int:
    """Choose a job's port: never equal for job numbers less than 8000 apart, rarely for other ids."""
    index = job if isinstance(job, int) else zlib.crc32(job.encode())
    return FIRST_PORT + 2 * (index % PORT_PAIR_COUNT)


def read_host_file(path: str) -> tuple[str, ...]:
    """Return the first word of each line of a host file, each once; () if the file is not on this host.

    Raises UsageError if it is not a regular file, or too large.
    """
    try:
        text = read_regular_file(path, MAX_HOSTFILE_BYTES).decode(errors="replace")
    except OSError as error:  # often the file is only on the job's first host
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise UsageError(f"{path} cannot be read as a host file: {error.strerror}", IGNORE_HINT) from None
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def env_for_started_ranks(
    cluster: str,
    variables: tuple[str, ...],
    place: RankAssignment,
    *,
    nnodes: int | None = None,
    max_nodes: int | None = None,
    node_rank: int | None = None,
    address: str | None = None,
    job: int | str | None = None,
) -> ClusterEnv:
    """Build the environment of a process that a launcher has started: a node if each node has one process, else a rank.

    Node rank and number of nodes are filled in only if they follow with certainty.

    Args:
        nnodes: number of nodes with processes. max_nodes: number of nodes that may have some.
        job: the launcher's id of the job, for port and run id; None or "" if it has none.

    Raises UsageError if the numbers contradict each other.
    """
    rank, size, local_size = place.rank, place.world_size, place.local_world_size
    if rank >= size:
        raise contradiction_error(f"{cluster}'s rank {rank}", f"its size {size}")
    if local_size is None and nnodes in (1, size):
        local_size = size // nnodes
    if local_size is not None:
        if place.local_rank >= local_size:
            raise contradiction_error(f"{cluster}'s local rank {place.local_rank}", f"its local size {local_size}")
        if local_size > size:
            raise contradiction_error(f"{cluster}'s local size {local_size}", f"its size {size}")
        if local_size == size:
            nnodes, node_rank = 1, 0
    alone = local_size == 1 and nnodes in (None, size) and (max_nodes is None or size <= max_nodes)
    if alone:
        nnodes, node_rank = size, rank if node_rank is None else node_rank
    if nnodes is not None and node_rank is not None and node_rank >= nnodes:
        raise contradiction_error(f"{cluster}'s node {node_rank}", f"its {nnodes} nodes")
    return ClusterEnv(
        cluster,
        variables,
        nnodes,
        node_rank,
        address=LOOPBACK if address is None and nnodes == 1 else address,
        port=None if job in (None, "") else port_for_job(job),
        run_id=None if job in (None, "") else str(job),
        rank_assignment=None if alone else replace(place, local_world_size=local_size),
    )


def derive_node_place(hosts: Sequence[int | str], place: RankAssignment) -> dict[str, int]:
    """Return ``nnodes`` and ``node_rank`` from the hosts of all ranks; {} if these are unknown."""
    rank = place.rank
    if rank >= place.world_size or place.world_size != len(hosts):
        return {}
    if hosts.count(hosts[rank]) != place.local_world_size:  # the hosts of another job
        return {}
    nodes = list(dict.fromkeys(hosts))
    return {"nnodes": len(nodes), "node_rank": nodes.index(hosts[rank])}


def outgoing_address() -> str | None:
    """Return the source address of this machine's default route; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        sock.connect(ROUTE_PROBE_ADDRESS)  # UDP: sends nothing, the kernel only chooses the route
        return str(sock.getsockname()[0])
    return None


def own_host_index(hosts: Sequence[str]) -> int | None:
    """Return the index of this machine in a list of hosts, None if the list does not contain it."""
    own = _label(host_name())
    return next((place for place, host in enumerate(hosts) if _label(host) == own), None)


def _label(host: str) -> str:
    """Return the first label of a host name, without its domain, to compare names with and without one."""
    return host.partition(".")[0]


def env_for_batch_script(
    cluster: str, variables: tuple[str, ...], allocation: Allocation, starter: str, on: str | None = None
) -> ClusterEnv:
    """Build the environment of a job's batch script, which runs on one of the job's hosts.

    Args:
        starter: the command that starts a process on each host.
        on: the host where the script runs, by default the first.

    Raises UsageError on another host of the job: this process may be one of several nodes.
    """
    hosts, count = allocation.hosts, len(allocation.hosts)
    place = own_host_index(hosts)
    if place is not None and _label(on or hosts[0]) != _label(hosts[place]):
        script = f"the script of {cluster} job {allocation.job_id}"
        raise UsageError(
            f"{script} runs on {on or hosts[0]}, and this is {hosts[place]}: it may be one of {count} nodes",
            f"on every host, as here: ddplaunch run --nnodes {count} --node-rank {place} --master-addr {hosts[0]} …\n"
            "this machine alone: ddplaunch run --standalone …, or --cluster none",
        )
    note = f"the script of {cluster} job {allocation.job_id} runs on one of its {count} hosts; to use all: {starter}"
    notes = (note,) if count > 1 else ()
    return ClusterEnv(cluster, variables, nnodes=1, node_rank=0, is_batch_script=True, notes=notes)


def env_for_array_task(cluster: str, environ: EnvVariables, index: str, missing_variable: str, what: str) -> ClusterEnv:
    """Build the environment of one of many numbered tasks, each a job of its own as far as variables show.

    Args:
        index: the variable with its number. what: its name in messages: pod, task, replica.
        missing_variable: the variable that would show that the tasks are one job.
    """
    note = f"{index}={environ[index]} without {missing_variable}: this {what} is treated as a job of its own"
    return ClusterEnv(cluster, (index,), nnodes=1, node_rank=0, may_be_single=True, notes=(note,))


def env_for_node(
    cluster: str,
    variables: tuple[str, ...],
    nnodes: int,
    node_rank: int,
    address: str | None,
    *,
    job: str | None = None,
    gpus: int | None = None,
    address_may_be_unknown: bool = False,
) -> ClusterEnv:
    """Build the environment of a node; ``job`` determines port and run id, ``gpus`` the processes per node.

    ``address_may_be_unknown``: the address is a name that may resolve only once node 0 has started.
    """
    port, nproc = port_for_job(job) if job else None, str(gpus) if gpus else None
    run_id = job or None
    return ClusterEnv(cluster, variables, nnodes, node_rank, None, address, address_may_be_unknown, port, run_id, nproc)


def env_from_node_variables(
    cluster: str,
    environ: EnvVariables,
    nnodes: str,
    node_rank: str,
    address: str,
    port: str | None,
    *,
    count: int | None = None,
    nproc: str | None = None,
    run_id: str | None = None,
    address_may_be_unknown: bool = False,
) -> ClusterEnv:
    """Build the environment of a node from variables that number nodes; the arguments are the names of the variables.

    Args:
        port: None if there is no such variable; then it is derived from ``run_id``.
        count: the number of nodes, if ``nnodes`` is not a plain number.
        nproc: the variable with the processes per node, or one of ``NPROC_KEYWORDS``; 0 means unset.
        address_may_be_unknown: whether the address is a name that may resolve only once node 0 has started.

    Raises UsageError if a variable is missing, is not a number, or contradicts another.
    """
    count = environ.number(nnodes) if count is None else count
    index = environ.number(node_rank)
    check_below(index, count, node_rank, nnodes)
    nproc_value = environ.get(nproc or "") or None
    if nproc and nproc_value not in (None, *NPROC_KEYWORDS):
        nproc_value = str(environ.number(nproc))
    return ClusterEnv(
        cluster,
        (nnodes, node_rank, address),
        count,
        index,
        address=environ.text(address) if count > 1 else environ.get(address) or None,
        address_may_be_unknown=address_may_be_unknown,
        port=environ.optional_number(port) if port else port_for_job(run_id) if run_id else None,
        run_id=run_id,
        nproc=None if nproc_value == "0" else nproc_value,
    )
