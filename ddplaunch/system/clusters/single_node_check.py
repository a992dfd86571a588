"""Safety check for single-node jobs: do variables suggest several nodes, although no cluster system was detected?

Each machine would then train alone, and all would write the same checkpoint. Such variables are an error, whose hint
has the commands for both cases. Variables that describe one machine, as in tests and for mp.spawn, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.plan.numbers import parse_int

# The last ones of each are from job scripts for NSML, Arnold and Taiji, whose manuals are not public.
NODE_RANK_VARIABLES = ("NODE_RANK", "GROUP_RANK", "MACHINE_RANK", "CROSS_RANK", "NODE_INDEX", "NSML_RANK", "ARNOLD_ID")
NODE_COUNT_VARIABLES = (
    "NNODES", "NUM_NODES", "NODE_COUNT", "NUM_MACHINES", "GROUP_WORLD_SIZE", "CROSS_SIZE", "NSML_WORLD_SIZE",
    "ARNOLD_WORKER_NUM", "HOST_NUM",
)  # fmt: skip
ADDRESS_VARIABLES = ("MASTER_ADDR", "TORCHX_RANK0_HOST", "NSML_HOST_RANK0", "ARNOLD_WORKER_0_HOST", "CHIEF_IP")
WORLD_SIZE_VARIABLE = "WORLD_SIZE"


def check_single_node(
    environ: Mapping[str, str], ranks: int, cluster_env: ClusterEnv | None, is_here: Callable[[str], bool | None]
) -> str | None:
    """Check a job with ``ranks`` ranks on this machine only; return a note for the user, or None.

    Args:
        cluster_env: one that leaves this open: of a batch script, or of one of many numbered tasks; else None.
        is_here: whether an address is this machine's, None if it cannot be resolved; called last.

    Raises UsageError if the variables suggest several nodes.
    """
    index, count, address = (
        next(filter(environ.get, names), None)
        for names in (NODE_RANK_VARIABLES, NODE_COUNT_VARIABLES, ADDRESS_VARIABLES)
    )
    size, node_rank, nnodes = (
        parse_int(environ.get(name or "", "").strip()) for name in (WORLD_SIZE_VARIABLE, index, count)
    )
    has_more_ranks = size is not None and size > ranks
    where = environ.get(address or "", "")
    is_loopback = where in ("localhost", "::1", "[::1]", "0.0.0.0") or where.startswith("127.")

    def ambiguity_error() -> UsageError:
        """Build the error with the variables that were found, and the commands for several nodes and for one."""
        number = index or (cluster_env.variables[0] if cluster_env and cluster_env.may_be_single else None)
        nodes = size // ranks if size and has_more_ranks and size % ranks == 0 else None
        names = (number, count, WORLD_SIZE_VARIABLE if has_more_ranks else None, address)
        settings = ", ".join(f"{name}={sanitize_line(environ[name])}" for name in names if name)
        known = {"the number of nodes": count or nodes, "the node rank": number, "node 0's address": address}
        lacking = next((f", but no variable has {what}" for what, value in known.items() if not value), "")
        nnodes = f'"${count}"' if count else nodes or "N"
        node_rank, master = (f'"${name}"' if name else unknown for name, unknown in ((number, "I"), (address, "HOST")))
        return UsageError(
            f"{settings}: this may be one node of several{lacking}",
            f"on every node: ddplaunch run --nnodes {nnodes} --node-rank {node_rank} --master-addr {master} …\n"
            "this machine alone: ddplaunch run --standalone …, or --cluster none",
        )

    if (count and nnodes != 1) or (index and node_rank != 0):
        raise ambiguity_error()
    if count or size == 1 or is_loopback or (cluster_env and cluster_env.is_batch_script):
        return None
    if has_more_ranks or (index and size != ranks) or (address and cluster_env):
        raise ambiguity_error()
    if not address or index:
        return None
    here = is_here(where)
    if here is False:
        raise ambiguity_error()
    note = f"{address}={sanitize_line(where)} cannot be resolved and is not used: this job has one node"
    return None if here else note
