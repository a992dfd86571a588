"""The text of a plan for --dry-run: host, device, CPUs and environment of each rank, and the source of each fact."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from ddplaunch.base.text import display_width
from ddplaunch.base.types import JsonObject
from ddplaunch.system.plan.numbers import format_cpulist
from ddplaunch.system.plan.plan import Fact, Plan
from ddplaunch.system.plan.rank_layout import Rank
from ddplaunch.system.target.target import TargetKind

_PER_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "ROLE_RANK",
    "DDPLAUNCH_DEVICE",
)
"""Environment variables that differ between ranks; columns of the table show most of them."""


def plain_lines(plan: Plan, options: Sequence[str] | None) -> Iterator[str]:
    """Render the plan as lines without colour or boxes, one line for each rank."""
    yield format_headline(plan)
    for fact in list_facts(plan):
        yield f"{fact.name}: {fact.value} ({fact.source})"
    yield ""
    if programs := list_programs(plan):
        for row, cells in _pad_rows(programs):
            name, kind, node, gpus, ready, after = cells[:-1]
            yield f"program {name}  {kind}  node {node}  GPUs {gpus}  ready {ready}  after {after}  {row[-1]}"
        yield ""
    for row, cells in _pad_rows([format_row(plan, rank) for rank in plan.shown_ranks]):
        number, node, local, host, device, cpus = *cells[:-1], row[-1]
        yield f"rank {number}  node {node}  host {host}  local rank {local}  device {device}  cpus {cpus}"
    yield ""
    common, own = describe_variables(plan)
    yield f"variables of every rank: {common}"
    yield f"variables of its own: {own}"
    for note in plan.notes:
        yield f"note: {note}"
    for node_rank, command in list_commands(plan, options):
        yield f"node {node_rank}: {command}"


def _pad_rows(rows: Sequence[Sequence[str]]) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Yield each row, and its cells padded to the width of their columns."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield row, [cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True)]


PROGRAM_HEADS = ("program", "kind", "node", "GPUs", "ready", "after", "command")


def list_programs(plan: Plan) -> list[tuple[str, ...]]:
    """List the programs beside the ranks, as rows under ``PROGRAM_HEADS``; not those whose GPUs are unknown."""
    return [_format_program(each) for each in plan.programs if each["gpus"] is not None]


def _format_program(program: JsonObject) -> tuple[str, ...]:
    command, gpus, after = ([*map(str, cast("list[object]", program[key]))] for key in ("command", "gpus", "after"))
    node, shown = str(program.get("node", 0)), format_cpulist(map(int, gpus))
    facts = shown or "-", str(program["ready"]) or "-", ", ".join(after) or "-"
    return str(program["name"]), str(program["kind"]), node, *facts, shlex.join(command)


def format_headline(plan: Plan) -> str:
    """Return the numbers of ranks and nodes, and the target."""
    if plan.started_rank:
        return f"rank {plan.node_rank} of {plan.world_size}, each with its own launcher: {shlex.join(plan.target.argv)}"
    nodes = f"{plan.nnodes} node{'s' * (plan.nnodes > 1)}"
    return f"{plan.world_size} rank{'s' * (plan.world_size > 1)} on {nodes}: {shlex.join(plan.target.argv)}"


def list_facts(plan: Plan) -> list[Fact]:
    """List what the plan was made from, each with its source."""
    if not plan.backend:
        return list(plan.facts)
    return [*plan.facts, Fact("process group", plan.backend, plan.init_method or "env://")]


def describe_variables(plan: Plan) -> tuple[str, str]:
    """Return the variables that are equal on all ranks, with their values, and the names of the others."""
    masked = [name for name in plan.device_masks[0] if name not in _PER_RANK_VARIABLES] if plan.device_masks else []
    own = [*_PER_RANK_VARIABLES, *masked, *["OMP_NUM_THREADS"] * (len({node.threads for node in plan.nodes}) > 1)]
    common = {name: value for name, value in plan.rank_environment(plan.shown_ranks[0]).items() if name not in own}
    return " ".join(f"{name}={value}" for name, value in common.items()), " ".join(own)


def format_row(plan: Plan, rank: Rank) -> tuple[str, ...]:
    """Return a rank's number, node, local rank, host, device and CPUs."""
    node, local = plan.node_and_local_rank(rank)
    cpus = format_cpulist(rank.cpus) if rank.cpus else "any"
    return str(rank.rank), "?" if node is None else str(node), str(local), rank.host or "?", rank.device, cpus


def list_commands(plan: Plan, options: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """Yield the node rank and command of each other node."""
    for node in () if plan.started_rank or options is None else plan.nodes:
        if options is not None and node.node_rank != plan.node_rank:
            yield node.node_rank, node_command(plan, node.node_rank, options)
    for number in range(plan.nnodes, plan.nnodes + plan.nodes_without_ranks):
        if options is not None:
            yield number, node_command(plan, number, options)


def node_command(plan: Plan, node_rank: int, options: Iterable[str]) -> str:
    """Return the command that a user runs to start ``node_rank``, with all that the nodes must agree on.

    ``options`` are the other options typed here, not those about nodes, addresses and counts.
    """
    nnodes = f"{plan.min_nodes}:{plan.nnodes}" if plan.min_nodes else str(plan.nnodes + plan.nodes_without_ranks)
    words = ["ddplaunch", "run", "--nnodes", nnodes, "--node-rank", str(node_rank) if plan.has_node_rank else "auto"]
    words += ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
    words += ["--nproc", plan.nproc_text, *options]
    if plan.target.kind in (TargetKind.MODULE, TargetKind.PROGRAM):
        words.append("-m" if plan.target.kind is TargetKind.MODULE else "--no-python")
    typed, args = plan.target.text, plan.target.args
    if typed.startswith("-"):
        words += ["--", typed, *args]
    else:
        words += [typed, *(("--", *args) if args else ())]
    return shlex.join(words)
