"""What the surroundings say about this process: a function or a row per system in ``systems/``, and ``detect`` over all.

Variables in, facts out: no scheduler is asked. Some systems give a file of hosts, which is read; some launchers of MPI
are asked about hosts, on the way that they give their processes.
The caller decides what to do with a cluster_env, and which options override it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from ddplaunch.clusters import systems
from ddplaunch.clusters.finding import REGISTERED_SYSTEMS, ClusterEnv, ClusterSystem
from ddplaunch.clusters.reading import port_for_job
from ddplaunch.clusters.systems.ranks import check_ambiguous_rank
from ddplaunch.clusters.variables import EnvVariables
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError

NO_CLUSTER = "none"  # what `--cluster` calls looking at nothing


def _load_systems() -> dict[str, ClusterSystem]:
    """Load every file of ``systems/``: a new one needs no other change."""
    for file in sorted(os.listdir(systems.__path__[0])):
        if file.endswith(".py") and not file.startswith("_"):
            import_module(f"{systems.__name__}.{file[:-3]}")
    return {each.name: each for each in sorted(REGISTERED_SYSTEMS, key=lambda each: each.priority)}


SYSTEMS = _load_systems()
"""All systems by their names, in the order in which they are asked."""


def detect(environ: Mapping[str, str], only: str | None = None) -> ClusterEnv | None:
    """Return what the first system that knows this process says about it, None if no system does.

    A batch system that only recognises a job's script comes last: variables set in that script say more.
    ``only`` is the one system to ask, or "none".

    Raises UsageError if ``only`` is unknown or does not run here; a variable is not a number or contradicts another;
    torch's variables are set, and nothing says whether they count nodes or processes.
    """
    if only == NO_CLUSTER:
        return None
    if only is not None and only not in SYSTEMS:
        raise UsageError(f"unknown --cluster {only}; known: {', '.join((*SYSTEMS, NO_CLUSTER))}")
    script: ClusterEnv | None = None
    for each in SYSTEMS.values() if only is None else (SYSTEMS[only],):
        cluster_env = each.detect(environ)
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
    """Name a variable that shows that a system started this process, or one above it; in doubt it did."""
    return next((name for each in SYSTEMS.values() for name in each.marker_variables if environ.get(name)), None)


def _with_allocation(cluster_env: ClusterEnv, environ: Mapping[str, str]) -> ClusterEnv:
    """Add what the batch system knows and the launcher inside it does not: where node 0 is, and a port for the job.

    MPI's launchers number processes and say nothing about hosts; by default they fill those of the allocation in its
    order, so that rank 0 is on the first.
    """
    if cluster_env.nnodes == 1 and not cluster_env.rank_assignment:
        return cluster_env
    given = next((found for each in SYSTEMS.values() if (found := each.read_allocation(environ))), None)
    if given is None:
        return cluster_env
    if cluster_env.port is None:
        cluster_env = replace(cluster_env, port=port_for_job(given.job_id))
    if cluster_env.address is None and given.hosts:
        first = given.hosts[0]
        note = f"rank 0 is expected on {first}, the first of {given.variable}; --master-addr says otherwise"
        variables = (*cluster_env.variables, given.variable)
        cluster_env = replace(cluster_env, address=first, variables=variables, notes=(*cluster_env.notes, note))
    return cluster_env
