"""Detects the cluster system that started this process, from its environment variables.

Each system has a function or a table row in ``systems/``; ``detect`` tries all. No scheduler is queried, but host files
are read, and some MPI launchers are asked for the hosts over the socket or library that they provide. A new system is a
function, row or file there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters import systems
from ddplaunch.system.clusters.cluster_env import REGISTERED_SYSTEMS, ClusterEnv, ClusterSystem
from ddplaunch.system.clusters.env_builders import port_for_job
from ddplaunch.system.clusters.env_variables import EnvVariables
from ddplaunch.system.clusters.systems.rank_launchers import check_ambiguous_rank

NO_CLUSTER = "none"  # the value of --cluster that disables detection


def _load_systems() -> dict[str, ClusterSystem]:
    """Import every file of ``systems/``: a new system needs no other change."""
    for file in sorted(os.listdir(systems.__path__[0])):
        if file.endswith(".py") and not file.startswith("_"):
            import_module(f"{systems.__name__}.{file[:-3]}")
    return {each.name: each for each in sorted(REGISTERED_SYSTEMS, key=lambda each: each.priority)}


SYSTEMS = _load_systems()
"""All systems by name, in the order of detection."""


def detect(environ: Mapping[str, str], only: str | None = None) -> ClusterEnv | None:
    """Return the cluster environment of the first system that detects this process, None if no system does.

    A system that only detects a job's batch script comes last: variables set in that script say more.
    ``only``: the only system to try, or "none".

    Raises UsageError if ``only`` is unknown or not detected; a variable is not a number or contradicts another; or it
    is unclear whether torch's variables count nodes or processes.
    """
    if only == NO_CLUSTER:
        return None
    if only is not None and only not in SYSTEMS:
        raise UsageError(f"unknown --cluster {only}; known: {', '.join((*SYSTEMS, NO_CLUSTER))}")
    script: ClusterEnv | None = None
    for system in SYSTEMS.values() if only is None else (SYSTEMS[only],):
        cluster_env = system.detect(environ)
        if cluster_env and not cluster_env.is_batch_script:
            return _with_allocation(cluster_env, environ)
        script = script or cluster_env
    if only is None:
        check_ambiguous_rank(EnvVariables(environ))
    if script:
        return _with_allocation(script, environ)
    if only is not None:
        what = f"--cluster {only} does not match this process: it needs {' or '.join(SYSTEMS[only].marker_variables)}"
        raise UsageError(what, "leave --cluster out to detect the system")
    return None


def find_marker(environ: Mapping[str, str]) -> str | None:
    """Return a variable which shows that a system started this process or an ancestor, None if there is none."""
    return next((name for each in SYSTEMS.values() for name in each.marker_variables if environ.get(name)), None)


def _with_allocation(cluster_env: ClusterEnv, environ: Mapping[str, str]) -> ClusterEnv:
    """Add node 0's address and a port, which an MPI launcher does not supply, from the batch system's allocation.

    MPI launchers fill the hosts of the allocation in its order by default, so rank 0 is on the first.
    """
    if cluster_env.nnodes == 1 and not cluster_env.rank_assignment:
        return cluster_env
    allocation = next((found for each in SYSTEMS.values() if (found := each.read_allocation(environ))), None)
    if allocation is None:
        return cluster_env
    if cluster_env.port is None:
        cluster_env = replace(cluster_env, port=port_for_job(allocation.job_id))
    if cluster_env.address is None and allocation.hosts:
        first = allocation.hosts[0]
        note = f"rank 0 is expected on {first}, the first of {allocation.variable}; --master-addr says otherwise"
        variables = (*cluster_env.variables, allocation.variable)
        cluster_env = replace(cluster_env, address=first, variables=variables, notes=(*cluster_env.notes, note))
    return cluster_env
