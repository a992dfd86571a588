"""From the options to the plan: what hosts or surroundings say, what this machine has, and what follows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from ddplaunch.cli.options import RunOptions
from ddplaunch.cli.rules import check_inspect_options, check_node_options, check_time_limits
from ddplaunch.cli.surroundings import (
    check_lone_node,
    cluster_notes,
    detect_cluster,
    ignored_rank_variables,
    to_started_rank,
)
from ddplaunch.cli.values import AUTO
from ddplaunch.clusters.finding import ClusterEnv
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.devices.machine import read_machine
from ddplaunch.errors import UsageError
from ddplaunch.plan.make import PlanSpec, make_plan
from ddplaunch.plan.plan import Plan
from ddplaunch.target.target import Target


@dataclass(frozen=True)
class PlanInputs:
    """A plan and what it was made from."""

    plan: Plan
    options: RunOptions  # as hosts or surroundings have completed them
    cluster_env: ClusterEnv | None  # what was used of what the surroundings say
    plan_for_node_rank: Callable[
        [int], Plan
    ]  # plans again, as this node rank, where node 0 is to give each node its own


def prepare_plan(options: RunOptions, target: Target, notes: Iterable[str], *, remote: bool) -> PlanInputs:
    """Plan the job; ``remote``: other hosts would run it, in a dry run.

    Raises:
        UsageError: the options contradict each other, the surroundings, or this machine.
    """
    said = list(notes)
    if ignored := ignored_rank_variables(options):
        said.append(ignored)
    options, finding = detect_cluster(options)
    if options.spares and (remote or finding) and not options.is_set("nnodes"):
        options = subtract_spares(options)
    check_node_options(options)
    check_inspect_options(options)
    check_time_limits(options)
    if finding:
        said[:0] = cluster_notes(finding)
    spec = _build_plan_spec(options, finding)
    machine, of_machine = read_machine(os.environ, spec, runs_here=not remote)
    said += of_machine
    run_id = options.run_id or new_run_id()
    if options.spares and options.dry_run:
        said.append(_describe_spares(options))

    def plan_as(node_rank: int) -> Plan:
        here = spec if spec.has_node_rank else replace(spec, node_rank=node_rank)
        return make_plan(here, target, machine, os.environ, run_id, said)

    plan = plan_as(0)
    if not remote and (remark := check_lone_node(options, finding, plan)):
        said.append(remark)
        plan = plan_as(0)
    return PlanInputs(plan, options, finding, plan_as)


def _describe_spares(options: RunOptions) -> str:
    first, last = options.nnodes[1], options.nnodes[1] + options.spares - 1
    if first == last:
        return f"1 spare (--node-rank {first}) waits to take the place of a node that is lost or fails"
    which = f"{first} {'and' if last == first + 1 else 'to'} {last}"
    return f"{options.spares} spares (--node-rank {which}) wait to take the place of nodes that are lost or fail"


def subtract_spares(options: RunOptions) -> RunOptions:
    """Have --nnodes without the spares, where it is the number of all hosts, of an allocation or of all pods."""
    lowest, highest = options.nnodes
    run = highest - options.spares
    if run < 1:
        what = f"--spares {options.spares} leaves none of {highest} nodes for the ranks"
        raise UsageError(what, f"--spares {highest - 2} or fewer" if highest > 2 else "leave --spares out")
    return options.with_values(options.sources["nnodes"], {"nnodes": (min(lowest, run), run)})


def _build_plan_spec(options: RunOptions, finding: ClusterEnv | None) -> PlanSpec:
    """Return what the plan needs; without a node rank where node 0 is to give one."""
    spares, highest = options.spares, options.nnodes[1]
    if spares and options.dry_run:
        if isinstance(options.node_rank, int) and options.node_rank >= highest:
            what = f"--node-rank {options.node_rank} is a spare at first: it has no ranks to show"
            raise UsageError(what, f"--dry-run with --node-rank 0 to {highest - 1} shows what the others start")
        spares = 0
    derived = {
        "nnodes": highest + spares,
        "min_nodes": options.nnodes[0],
        "node_rank": options.node_rank if isinstance(options.node_rank, int) else None,
        "started_rank": to_started_rank(finding),
        "sources": dict.fromkeys(options.inferred_names, finding.cluster) if finding else {},
        "has_node_rank": options.node_rank != AUTO,
    }
    return PlanSpec(**options.subset_for(PlanSpec) | derived)


def new_run_id() -> str:
    """Name a job that the user has not named."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
