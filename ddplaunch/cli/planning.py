"""Makes the plan of a job from the options, the cluster's environment variables and the devices of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.cluster_detection import (
    check_lone_node,
    cluster_notes,
    detect_cluster,
    ignored_rank_variables,
    to_started_rank,
)
from ddplaunch.cli.job_config_options import check_inspect_options, check_node_options, check_time_limits
from ddplaunch.cli.option_values import AUTO
from ddplaunch.cli.run_options import RunOptions
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.devices.machine import read_machine
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.planner import PlanSpec, make_plan
from ddplaunch.system.target.target import Target


class PlanInputs(Struct, frozen=True):
    """A plan and what it was made from."""

    plan: Plan
    options: RunOptions  # with the values that hosts or the cluster environment supply
    cluster_env: ClusterEnv | None  # the cluster environment, if any was used
    plan_for_node_rank: Callable[[int], Plan]  # with --node-rank auto: the plan of another node rank


def prepare_plan(options: RunOptions, target: Target, notes: Iterable[str], *, remote: bool) -> PlanInputs:
    """Plan the job. ``remote``: a dry run of a job over SSH, so this machine is only assumed to be like the hosts.

    Raises:
        UsageError: the options contradict each other, the cluster environment, or this machine.
    """
    all_notes = list(notes)
    if ignored := ignored_rank_variables(options):
        all_notes.append(ignored)
    options, cluster_env = detect_cluster(options)
    if options.spares and (remote or cluster_env) and not options.is_set("nnodes"):
        options = subtract_spares(options)
    check_node_options(options)
    check_inspect_options(options)
    check_time_limits(options)
    if cluster_env:
        all_notes[:0] = cluster_notes(cluster_env)
    spec = _build_plan_spec(options, cluster_env)
    machine, machine_notes = read_machine(os.environ, spec, runs_here=not remote)
    all_notes += machine_notes
    run_id = options.run_id or new_run_id()
    if options.spares and options.dry_run:
        all_notes.append(_describe_spares(options))

    def plan_as(node_rank: int) -> Plan:
        here = spec if spec.has_node_rank else replace(spec, node_rank=node_rank)
        return make_plan(here, target, machine, os.environ, run_id, all_notes)

    plan = plan_as(0)
    if not remote and (note := check_lone_node(options, cluster_env, plan)):
        all_notes.append(note)
        plan = plan_as(0)
    return PlanInputs(plan, options, cluster_env, plan_as)


def _describe_spares(options: RunOptions) -> str:
    first, last = options.nnodes[1], options.nnodes[1] + options.spares - 1
    if first == last:
        return f"1 spare (--node-rank {first}) waits to take the place of a node that is lost or fails"
    which = f"{first} {'and' if last == first + 1 else 'to'} {last}"
    return f"{options.spares} spares (--node-rank {which}) wait to take the place of nodes that are lost or fail"


def subtract_spares(options: RunOptions) -> RunOptions:
    """Subtract the spares from --nnodes, where that counts all hosts, pods, or nodes of an allocation."""
    lowest, highest = options.nnodes
    run = highest - options.spares
    if run < 1:
        what = f"--spares {options.spares} leaves none of {highest} nodes for the ranks"
        raise UsageError(what, f"--spares {highest - 2} or fewer" if highest > 2 else "leave --spares out")
    return options.with_values(options.sources["nnodes"], {"nnodes": (min(lowest, run), run)})


def _build_plan_spec(options: RunOptions, cluster_env: ClusterEnv | None) -> PlanSpec:
    """Return the input of the planner; without a node rank if node 0 assigns it."""
    spares, highest = options.spares, options.nnodes[1]
    if spares and options.dry_run:
        if isinstance(options.node_rank, int) and options.node_rank >= highest:
            what = f"--node-rank {options.node_rank} is a spare at first: it has no ranks yet"
            raise UsageError(what, f"--dry-run with --node-rank 0 to {highest - 1} shows the ranks of the other nodes")
        spares = 0
    derived = {
        "nnodes": highest + spares,
        "min_nodes": options.nnodes[0],
        "node_rank": options.node_rank if isinstance(options.node_rank, int) else None,
        "started_rank": to_started_rank(cluster_env),
        "sources": dict.fromkeys(options.inferred_names, cluster_env.cluster) if cluster_env else {},
        "has_node_rank": options.node_rank != AUTO,
    }
    return PlanSpec(**options.subset_for(PlanSpec) | derived)


def new_run_id() -> str:
    """Return the run id of a job without --run-id: the time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
