"""Makes the feature's node side and job side for a job with programs; checks the programs before anything starts."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable
from shlex import join

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.base.text import format_count, join_names
from ddplaunch.base.types import JsonObject
from ddplaunch.core.feature import FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.options import Connections, DryRun, Elastic, Nodes, RanksPerNode, Stopping, wants_free_gpus
from ddplaunch.features.programs.addresses import list_ports
from ddplaunch.features.programs.gpus import divide_gpus
from ddplaunch.features.programs.job import ProgramsJob
from ddplaunch.features.programs.node import ProgramRunner
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.placement import Instance, Placement, place_programs
from ddplaunch.features.programs.sidecars import read_sidecars, read_url_patterns
from ddplaunch.features.programs.spec import Programs, ProgramSpec, decode_programs
from ddplaunch.features.programs.words import default_target_name
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.network.reserved_port import bind_reusable, describe_listener
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.planner import PlanSpec
from ddplaunch.system.plan.rendezvous import DEFAULT_PORT, SOURCE_ASSUMED
from ddplaunch.system.target.target import Target


def _read_programs(options: Options, target: str) -> Programs | None:
    """Return the programs of ``--program``, on all nodes; ``target``: the name of the ranks' program."""
    return decode_programs(options[ProgramOptions].program, default_target_name([target]))


def _read_sidecars(options: Options, plan: Plan, *, is_remote: bool = False) -> tuple[ProgramSpec, ...]:
    """Return the sidecars of this node; only node 0 has any."""
    if plan.node_rank:
        return ()
    return read_sidecars(options[ProgramOptions], options[Stopping].grace, is_remote=is_remote)


def complete_spec(options: Options, spec: PlanSpec, target: Target, *, is_remote: bool) -> PlanSpec:
    """Return the planner's input with the programs, and the GPUs that they leave to the ranks of this node.

    Raises UsageError if the job has too few nodes or GPUs, or a GPU is given twice.
    """
    programs = _read_programs(options, target.text)
    if programs is None:
        return spec
    placement = place_programs(programs, spec.nnodes)
    spec = replace(spec, programs=tuple(map(_program_to_json, placement.instances)))
    if placement.nodes_with_ranks < spec.nnodes:
        spec = _leave_out_nodes(spec, placement, is_dry_run=options[DryRun].dry_run)
    if is_remote or not spec.has_node_rank:
        return spec
    node = _node_rank(spec)
    if node >= placement.nodes_with_ranks:
        return replace(spec, nproc="1", gpus="none", backend=None, bind=None, oversubscribe=False)
    here = [each.spec for each in placement.on(node)]
    _check_free_gpus(options, here)
    hardware = read_hardware()
    division = divide_gpus(here, programs.target, spec.gpus, hardware, os.environ)
    shares = {each.name: division.by_program.get(each.name, ()) for each in here}
    for other in {each.node for each in placement.instances} - {node} if options[DryRun].dry_run else ():
        # Assumed to be like this node, as for its ranks.
        specs = [each.spec for each in placement.on(other)]
        target_there = programs.target if other < placement.nodes_with_ranks else None
        shares_there = divide_gpus(specs, target_there, spec.gpus, hardware, os.environ).by_program
        shares |= {each.name: shares_there.get(each.name, ()) for each in specs}
    listed = (_program_to_json(each, shares.get(each.spec.name)) for each in placement.instances)
    return replace(spec, programs=tuple(listed), gpus=spec.gpus if division.rest is None else division.rest)


def _check_free_gpus(options: Options, here: Iterable[ProgramSpec]) -> None:
    """Raise UsageError if the ranks get free GPUs, which are chosen for them alone, and other programs some too."""
    gpus = options[RanksPerNode].gpus
    if wants_free_gpus(gpus) and (others := [each.name for each in here if each.gpus not in ("", 0)]):
        what = f"--gpus {gpus} chooses GPUs for the ranks alone, and {join_names(others)} wants some too"
        raise UsageError(what, "name the GPUs: `ddplaunch devices` shows which are in use")


def _leave_out_nodes(spec: PlanSpec, placement: Placement, *, is_dry_run: bool) -> PlanSpec:
    """Return the planner's input without ranks on the last nodes; a dry run's plan leaves these nodes out."""
    least, most = placement.nodes_with_ranks, spec.nnodes
    if not is_dry_run:
        listed = (spec.nproc or "").count(",") == least - 1 > 0
        return replace(spec, nproc=f"{spec.nproc}{',1' * (most - least)}") if listed else spec
    if (node := _node_rank(spec)) >= least:
        names = join_names(each.spec.name for each in placement.on(node))
        what = f"--node-rank {node} has no ranks: it runs {names}"
        raise UsageError(what, f"--dry-run with --node-rank 0 to {least - 1} shows the ranks of the other nodes")
    counts = (spec.nproc or "").split(",")
    nproc = ",".join(counts[:least]) if len(counts) > 1 else spec.nproc
    spec = replace(spec, nnodes=least, min_nodes=None, nproc=nproc, nodes_without_ranks=most - least)
    if spec.master_port is not None:
        return spec
    return replace(spec, master_port=DEFAULT_PORT, sources={**spec.sources, "master_port": SOURCE_ASSUMED})


def _node_rank(spec: PlanSpec) -> int:
    """Return this node's rank, as the planner finds it."""
    if spec.node_rank is not None or spec.nnodes == 1:
        return spec.node_rank or 0
    return parse_int(os.environ.get("NODE_RANK", "0")) or 0


def _program_to_json(instance: Instance, gpus: Iterable[int] | None = None) -> JsonObject:
    """Return a program as in plan.json; its GPUs are known on its node."""
    spec = instance.spec
    shown = None if gpus is None else list(gpus)
    fields: JsonObject = {"name": spec.name, "kind": spec.kind, "command": list(spec.shown_command), "gpus": shown}
    return {**fields, "ready": spec.ready, "after": list(spec.after or ()), "node": instance.node}


def configure_job(config: JobConfig, options: Options) -> JobConfig:
    """Return the job config with the nodes that the programs have for themselves."""
    programs = _read_programs(options, "")
    own = sum(each.nodes for each in programs.beside) if programs else 0
    return replace(config, without_ranks=own) if own < config.max_nodes else config  # else refused: complete_spec


def is_without_ranks(options: Options, plan: Plan) -> bool:
    """Whether this node runs programs but no ranks."""
    programs = _read_programs(options, "")
    own = sum(each.nodes for each in programs.beside) if programs else 0
    return bool(own) and plan.node_rank >= options[Nodes].nnodes[1] - own


def make_node_side(context: FeatureContext) -> NodeSide | None:
    sidecars = _read_sidecars(context.options, context.plan)
    programs = _read_programs(context.options, context.plan.target.text)
    if not (sidecars or programs):
        return None
    return ProgramRunner(context, sidecars, programs, read_url_patterns(context.options[ProgramOptions]))


def make_job_side(context: JobContext) -> JobSide | None:
    programs = _read_programs(context.options, "")
    return ProgramsJob(context, programs) if programs else None


def check_start(options: Options, plan: Plan, *, is_remote: bool) -> None:
    """Raise UsageError if a program does not exist, or its fixed port is taken; ``is_remote``: not on this machine."""
    _read_sidecars(options, plan, is_remote=is_remote)
    programs = _read_programs(options, plan.target.text)
    if programs is None:
        return
    if plan.nnodes > 1 and options[Connections].control == "none":
        raise UsageError("several programs do not work with --control none", "leave --control none out")
    if plan.started_rank:
        what = "several programs do not work where another launcher has started each rank"
        raise UsageError(what, "start one task on each node")
    _check_nodes(options, plan, programs)
    ports = list_ports(programs, plan.target.args)
    if is_remote:
        return
    here = place_programs(programs, options[Nodes].nnodes[1]).on(plan.node_rank)
    for instance in here:
        _check_command(instance.spec)
    for (name, _), number in ports.items():
        if number is not None and any(each.program == name for each in here) and not _is_port_free(number):
            what = f"port {number} of {name} is in use by {describe_listener(number)}"
            raise UsageError(what, "end that program, or write {port} for a free one")


def _check_nodes(options: Options, plan: Plan, programs: Programs) -> None:
    """Raise UsageError if programs have nodes for themselves in a job whose nodes are not fixed."""
    if not (name := next((each.name for each in programs.beside if each.has_fixed_nodes), "")):
        return
    lowest, highest = options[Nodes].nnodes
    spares = options[Elastic].spares
    if lowest != highest or spares:
        what = f"--spares {spares}" if spares else f"--nnodes {lowest}:{highest}"
        raise UsageError(f"{what} does not work with nodes of {name}", "leave one of them out")
    if not plan.has_node_rank:
        raise UsageError(f"--node-rank auto does not work with nodes of {name}", "give each node its number")


def describe(options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
    """Return the notes of a dry run; programs have notes only if their GPUs are unknown, as else a table shows them."""
    programs = _read_programs(options, plan.target.text)
    notes = [_describe_program(each) for each in (programs.beside if programs and is_remote else ())]
    sidecars = _read_sidecars(options, plan, is_remote=is_remote)
    return [*notes, *(f"sidecar on node 0: {join(each.command)}" for each in sidecars)]


def _check_command(spec: ProgramSpec) -> None:
    if spec.cwd and not os.path.isdir(os.path.expanduser(spec.cwd)):
        raise UsageError(f"{spec.name}: the folder {spec.cwd} does not exist", "name one that exists with cwd")
    if spec.is_world:
        return  # its own launcher checks that
    command = spec.command[0]
    where = os.path.join(os.path.expanduser(spec.cwd), command) if os.sep in command else command
    if shutil.which(where, path=spec.env.get("PATH")) is None:
        hint = "name one on PATH, or ./NAME; for a shell: sh -c '…'"
        raise UsageError(f"program {command} not found", hint)


def _is_port_free(number: int) -> bool:
    try:
        with bind_reusable(socket.AF_INET, "", number) as sock:
            sock.listen()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _describe_program(spec: ProgramSpec) -> str:
    """Return the note of a dry run: "service vllm, ready by http:/health: vllm serve …"."""
    facts = [f"{spec.kind} {spec.name}"]
    facts += [f"on {format_count(spec.nodes, 'node')} of its own"] * bool(spec.nodes)
    facts += [f"with {spec.beside}"] * bool(spec.beside)
    facts += ["on each node"] * spec.each_node
    facts += [f"{spec.count} processes" + " on each" * spec.has_fixed_nodes] * (spec.count > 1)
    facts += [f"GPUs {spec.gpus}"] * bool(spec.gpus)
    facts += [f"ready by {spec.ready}"] * bool(spec.ready)
    facts += [f"after {', '.join(spec.after or ())}"] * bool(spec.after)
    return f"{', '.join(facts)}: {join(spec.shown_command)}"
