"""What the surroundings say, where flags are silent: a finding of ``clusters`` becomes part of the request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.errors import EXIT_USAGE, UsageError

if TYPE_CHECKING:
    from ddplaunch.clusters.finding import Finding
    from ddplaunch.clusters.finding import Place as _Place
    from ddplaunch.plan.layout import Place

INSIDE = "DDPLAUNCH_DEVICE"
"""Every rank of ours has it: what a rank starts with ddplaunch is a job of its own, not that rank again."""

TORCHRUN = "torchelastic"
"""Where torchrun has started us it coordinates the ranks and holds their store; we only run ours."""

_KEPT = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "ROLE_NAME")

_ONE_LOG = {"slurm", "openmpi", "mpich", "mvapich", "flux", "pals", "lsf", TORCHRUN}
"""Where one program (srun, mpirun, …) shows what all of its processes print, unless it is told otherwise."""

_NODES = {"nnodes", "node_rank"}
"""Who types one of these describes the job himself; what was found of it then says nothing."""


def look_around(flags: dict[str, Any]) -> Finding | None:
    """Fill in what nobody typed from what the surroundings say; return what was used, None where nothing was.

    ``flags["nnodes"]`` is (fewest, most) here; an elastic job describes itself.

    Raises:
        UsageError: the variables make no sense, or contradict what was typed.
    """
    from ddplaunch.clusters import find

    context = click.get_current_context()
    typed = {
        name
        for name in flags
        if (source := context.get_parameter_source(name)) is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
    }
    flags["found"] = frozenset()
    if INSIDE in os.environ and flags["cluster"] is None:
        return None
    if typed & _NODES and flags["cluster"] is None:
        return None
    found = find(os.environ, flags["cluster"])
    if found is None:
        return None
    if found.place is not None:
        if flags["nproc"] not in (None, "1"):
            raise _too_many(found, found.place, flags["nproc"])
        _fill(flags, typed, nnodes=(found.place.world_size,) * 2, node_rank=found.place.rank, nproc="1")
    else:
        _fill(flags, typed, nnodes=(found.nnodes,) * 2, node_rank=found.node_rank, nproc=found.nproc)
    if flags["nnodes"] == (1, 1):
        return found
    if found.cluster == TORCHRUN:
        flags["control"] = "none"
    by_variable = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
    silent = {name for name, variable in by_variable.items() if not os.environ.get(variable)}
    _fill(
        flags,
        typed,
        **{name: getattr(found, name.removeprefix("master_").replace("addr", "address")) for name in silent},
    )
    _fill(flags, typed, run_id=found.run_id)
    return found


def _too_many(found: Finding, place: _Place, nproc: str) -> BaseException:
    """Each of the ranks that somebody has started refuses to start several; where they share a log, rank 0 says why."""
    if place.rank and one_log(found):
        return SystemExit(EXIT_USAGE)
    starter = "mpirun -npernode 1 ddplaunch run …, or what does the same"
    if found.cluster == "slurm":
        each = f"--nodes={found.nnodes} --ntasks={found.nnodes} --ntasks-per-node=1"
        starter = f"srun {each} ddplaunch run --nproc {nproc} …"
    return UsageError(
        f"this is rank {place.rank} of {place.world_size} already ({found.cluster}), and --nproc {nproc} would start "
        "more in each",
        f"leave --nproc out, or --cluster none; or start one launcher a node:\n{starter}",
    )


def _fill(flags: dict[str, Any], typed: set[str], **values: Any) -> None:
    for name, value in values.items():
        if name not in typed and value is not None:
            flags[name] = value
            flags["found"] |= {name}


TOKEN = "DDPLAUNCH_TOKEN"


def check_token(token: str | None, name: str = "--token") -> None:
    """Refuse a token that is empty: of a secret that is not set it would be none, and the job open to all.

    Args:
        token: as typed, else as the variable has it; click takes an empty variable for none.
        name: where it was typed.

    Raises:
        UsageError: it is empty.
    """
    typed = token if token is not None else os.environ.get(TOKEN)
    if typed is not None and not typed.strip():
        name = name if token is not None else TOKEN
        raise UsageError(f"{name} is empty: it would keep nobody out", f"give a secret, or leave {name} out")


def place_of(found: Finding | None) -> Place | None:
    """This process's place as the plan has it, where somebody else has started all ranks."""
    if found is None or found.place is None:
        return None
    from ddplaunch.plan.layout import Place

    kept = tuple((name, os.environ[name]) for name in _KEPT if name in os.environ) if found.cluster == TORCHRUN else ()
    return Place(found.place.local_rank, found.place.local_world_size, found.node_rank, found.nnodes, kept)


def one_log(found: Finding | None) -> bool:
    """Whether what all nodes print comes to one place; submitit has srun write a file for each."""
    return found is not None and found.cluster in _ONE_LOG and "SUBMITIT_EXECUTOR" not in os.environ


def address_comes_late(found: Finding | None, flags: dict[str, Any]) -> bool:
    """Whether node 0's address is a name of the system's that may not be known yet; a typed one is known or wrong."""
    typed = flags["master_addr"] is not None and "master_addr" not in flags["found"]
    return found is not None and found.address_comes_late and not typed


def surroundings_notes(found: Finding) -> Iterator[str]:
    """Say in one line what was found, and from which variables; once for the job, unless there is more to say."""
    if found.place is not None:
        first, many = found.place.rank == 0, found.place.world_size > 1
        what = f"rank {found.place.rank} of {found.place.world_size}"
    else:
        first, many = found.node_rank == 0, (found.nnodes or 1) > 1
        what = f"node {found.node_rank} of {found.nnodes}"
    if many and first:
        where = f", at {found.address}" if found.address else ""
        yield f"{found.cluster}: this is {what}{where} ({', '.join(found.variables)}; --cluster none to ignore)"
    if first:
        yield from found.notes
