"""Makes the plan of a job from the options, the cluster's environment variables and the devices of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.cli.cluster_detection import (
    check_lone_node,
    cluster_notes,
    detect_cluster,
    ignored_variables_note,
    separate_trainings_note,
    to_external_rank,
)
from ddplaunch.cli.console_output import print_note
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.isolation import Isolation
from ddplaunch.core.option_values import AUTO
from ddplaunch.core.options import DryRun, Elastic, Nodes, Starting
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.system import run_name
from ddplaunch.system.clusters.cluster_env import ClusterEnv
from ddplaunch.system.devices.machine import read_machine
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.planner import PlanSpec, make_plan
from ddplaunch.system.target.target import Target


class PreparedPlan(Struct, frozen=True):
    """A plan, and the options and the cluster environment from which it was made."""

    plan: Plan
    options: Options  # with the values that hosts or the cluster environment supply
    cluster_env: ClusterEnv | None  # the cluster environment, if any was used
    plan_for_node_rank: Callable[[int], Plan]  # with --node-rank auto: the plan of another node rank


def prepare_plan(options: Options, target: Target, notes: Iterable[str], *, remote: bool) -> PreparedPlan:
    """Plan the job. ``remote``: a dry run of a job over SSH; the hosts are assumed to be like this machine.

    Raises UsageError if the options contradict each other, the cluster environment, or this machine.
    """
    all_notes = list(notes)
    if ignored := ignored_variables_note(options):
        all_notes.append(ignored)
    if not remote and (equal := separate_trainings_note(options)):
        all_notes.append(equal)
    options, cluster_env = detect_cluster(options)
    if options[Elastic].spares and (remote or cluster_env) and not options.is_set("nnodes"):
        options = subtract_spares(options)
    options.check_contradictions()
    if cluster_env:
        all_notes[:0] = cluster_notes(cluster_env)
    spec = _build_plan_spec(options, cluster_env)
    for _, feature in load_features():
        spec = feature.adjust_spec(options, spec, target, is_remote=remote)
    machine, machine_notes = read_machine(os.environ, spec, runs_here=not remote)
    all_notes += machine_notes
    run_id = new_run_id(options, target)
    if options[Elastic].spares and options[DryRun].dry_run:
        all_notes.append(_describe_spares(options))

    def plan_as(node_rank: int) -> Plan:
        here = spec if spec.has_node_rank else replace(spec, node_rank=node_rank)
        return make_plan(here, target, machine, os.environ, run_id, all_notes)

    plan = plan_as(0)
    if not remote and (note := check_lone_node(options, cluster_env, plan)):
        all_notes.append(note)
        plan = plan_as(0)
    return PreparedPlan(plan, options, cluster_env, plan_as)


def _describe_spares(options: Options) -> str:
    spares, first = options[Elastic].spares, options[Nodes].nnodes[1]
    last = first + spares - 1
    if first == last:
        return f"1 spare (--node-rank {first}) waits to take the place of a node that is lost or fails"
    which = f"{first} {'and' if last == first + 1 else 'to'} {last}"
    return f"{spares} spares (--node-rank {which}) wait to take the place of nodes that are lost or fail"


def subtract_spares(options: Options) -> Options:
    """Subtract --spares from --nnodes; for jobs whose --nnodes counts all hosts, pods or allocated nodes."""
    lowest, highest = options[Nodes].nnodes
    run = highest - options[Elastic].spares
    if run < 1:
        what = f"--spares {options[Elastic].spares} leaves none of {highest} nodes for the ranks"
        raise UsageError(what, f"--spares {highest - 2} or fewer" if highest > 2 else "leave --spares out")
    return options.with_values(options.sources["nnodes"], {"nnodes": (min(lowest, run), run)})


def _build_plan_spec(options: Options, cluster_env: ClusterEnv | None) -> PlanSpec:
    """Return the input of the planner; without a node rank if node 0 assigns it."""
    nodes, spares = options[Nodes], options[Elastic].spares
    lowest, highest = nodes.nnodes
    node_rank = nodes.node_rank if isinstance(nodes.node_rank, int) else None
    if spares and options[DryRun].dry_run:
        if node_rank is not None and node_rank >= highest:
            what = f"--node-rank {node_rank} is a spare at first: it has no ranks yet"
            raise UsageError(what, f"--dry-run with --node-rank 0 to {highest - 1} shows the ranks of the other nodes")
        spares = 0
    derived = {
        "nnodes": highest + spares,
        "min_nodes": lowest,
        "node_rank": node_rank,
        "started_rank": to_external_rank(cluster_env),
        "sources": dict.fromkeys(options.names_from_cluster, cluster_env.cluster) if cluster_env else {},
        "has_node_rank": nodes.node_rank != AUTO,
    }
    same = {name: options.value(name) for name in PlanSpec.__struct_fields__ if name in options.sources}
    return PlanSpec(**{**same, **derived})


def plan_zygote(options: Options, plan: Plan) -> ZygotePlan:
    """Plan what this node's zygote does before the ranks start: nothing, unless a feature adds something."""
    start = options[Starting].start
    zygote_plan = ZygotePlan(forks=start == "zygote", source="--start zygote")
    if start == "exec" or (start == "auto" and sys.platform != "linux"):
        return zygote_plan
    for name, feature in load_features():
        isolation = Isolation(f"the feature {name}", print_note)
        zygote_plan = isolation.call(feature.plan_zygote, options, plan, zygote_plan) or zygote_plan
    return zygote_plan


def new_run_id(options: Options, target: Target) -> str:
    """Return --run-id, or a new name for the run: of --name or the target, with a number.

    A dry run reserves no number, nor does a run that is not recorded: its default name is the time with random digits.
    A node that is not the first gets the name from node 0.
    """
    nodes, is_recorded = options[Nodes], not options.value("no_history")
    if nodes.run_id:
        return nodes.run_id
    if (nodes.node_rank and nodes.node_rank != AUTO) or not (is_recorded or nodes.name):
        return run_name.random_name()
    reserves = is_recorded and not options[DryRun].dry_run
    return run_name.next_name(nodes.name or run_name.stem_of(target), plain_first=bool(nodes.name), reserve=reserves)
