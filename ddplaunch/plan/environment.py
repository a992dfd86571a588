"""The variables that each rank gets: torch's env:// contract, torchrun's names for the rest, DDPLAUNCH_* for ours.

Frameworks find out where they are from these names (torch.distributed.is_torchelastic_launched() looks for
TORCHELASTIC_RUN_ID, Lightning and accelerate for LOCAL_RANK and GROUP_RANK), so all that torchrun sets is set.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.plan.layout import Node, Rank

ROLE = "default"  # what `--role` may name otherwise. It is a name only: ranks are not numbered by roles.


def worker_environment(
    rank: Rank,
    node: Node,
    *,
    nnodes: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    run_id: str,
    attempt: int,
    max_restarts: int,
    variables: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of one rank on ``node``; ``variables`` are those that are alike on all ranks."""
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(node.local_world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(nnodes),
        "NODE_RANK": str(rank.node_rank),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": node.threads,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # "True" would make every rank, rank 0 included, a client, and a script's own tcp:// store hang.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DDPLAUNCH_DEVICE": rank.device,
        **variables,
    }
