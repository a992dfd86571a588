"""torch's own variables, complete: another launcher has started every process, and this is one of them.

RANK without LOCAL_RANK does not count processes: in the pods of a PyTorchJob it is the pod's index.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding, Place
from ddplaunch.clusters.reading import check_below, contradiction, is_set, number, number_if_set, numbers
from ddplaunch.errors import UsageError

RANK = "RANK"  # 3
WORLD_SIZE = "WORLD_SIZE"  # 4
LOCAL_RANK = "LOCAL_RANK"  # 1
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # 2; torchrun and ddplaunch set it, Azure ML does not
ADDRESS = "MASTER_ADDR"  # 10.0.0.4
PORT = "MASTER_PORT"  # 29500
NODE_RANKS = ("GROUP_RANK", "NODE_RANK")  # torchrun's name, Lightning's and Azure ML's
NNODES = "GROUP_WORLD_SIZE"  # 2


def check_unclear(environ: Mapping[str, str]) -> None:
    """Refuse to guess what RANK and WORLD_SIZE mean alone: some systems count nodes with them, others processes.

    A guess would start every machine's job alone, or a rank too many on each. Raises UsageError if they are set, and
    count more than one.
    """
    size = environ.get(WORLD_SIZE, "").strip()
    if not is_set(environ, RANK, WORLD_SIZE) or is_set(environ, LOCAL_RANK) or size == "1":
        return
    both = f"{RANK}={environ[RANK]} and {WORLD_SIZE}={environ[WORLD_SIZE]}"
    raise UsageError(
        f"{both} without {LOCAL_RANK}: they count either nodes or processes",
        f'nodes: ddplaunch run --nnodes "${WORLD_SIZE}" --node-rank "${RANK}" …; processes: set {LOCAL_RANK} in each\n'
        "neither: ddplaunch run --cluster none …, for this machine alone",
    )


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that has all of torch's variables."""
    needed = (RANK, WORLD_SIZE, LOCAL_RANK, ADDRESS, PORT)
    if not is_set(environ, *needed):
        return None
    rank, world_size, local_rank = numbers(environ, RANK, WORLD_SIZE, LOCAL_RANK)
    local_size = number_if_set(environ, LOCAL_WORLD_SIZE)
    check_below(rank, world_size, RANK, WORLD_SIZE)
    if local_size is not None:
        check_below(local_rank, local_size, LOCAL_RANK, LOCAL_WORLD_SIZE)
        if local_size > world_size:
            raise contradiction(f"{LOCAL_WORLD_SIZE}={local_size}", f"{WORLD_SIZE}={world_size}")
    nnodes = number_if_set(environ, NNODES)
    node_rank = next((number(environ, name) for name in NODE_RANKS if is_set(environ, name)), None)
    if local_size == world_size:
        nnodes, node_rank = 1, 0
    place, port = Place(rank, world_size, local_rank, local_size), number(environ, PORT)
    return Finding("torch", needed, nnodes, node_rank, address=environ[ADDRESS], port=port, place=place)
