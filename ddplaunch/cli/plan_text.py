"""Prints a plan for --dry-run: host, device, CPUs and environment of each rank, and the source of each fact."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddplaunch.base.text import display_width, shell_quote
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.system.plan.launch_command import node_command
from ddplaunch.system.plan.numbers import format_cpulist
from ddplaunch.system.plan.plan import Fact, Plan
from ddplaunch.system.plan.rank_layout import Rank
from ddplaunch.system.plan.rendezvous import SOURCE_ASSUMED, SOURCE_MISSING

if TYPE_CHECKING:
    from rich.console import Console


_PER_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "ROLE_RANK",
    "DDPLAUNCH_DEVICE",
)
"""Environment variables that differ between ranks; the table has their parts."""

MAX_ROWS, MAX_COMMANDS = 64, 8
"""On a terminal; piped, or with ``--json``, everything is printed."""


def print_layout(plan: Plan, options: Sequence[str] | None) -> None:
    """Print the plan; ``options``: to repeat in the other nodes' commands; None: no command is needed there."""
    if sys.stdout.isatty():
        from rich.console import Console

        _print_table(Console(highlight=False, no_color=not is_colour_allowed()), plan, options)
    else:
        sys.stdout.write("".join(line + "\n" for line in _plain_lines(plan, options)))


def _plain_lines(plan: Plan, options: Sequence[str] | None) -> Iterator[str]:
    """Render the plan as lines without colour or boxes, one line for each rank."""
    yield _headline(plan)
    for fact in _facts(plan):
        yield f"{fact.name}: {fact.value} ({fact.source})"
    yield ""
    rows = [_row(plan, rank) for rank in plan.shown_ranks]
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True)]
        number, node, local, host, device, cpus = *cells[:-1], row[-1]
        yield f"rank {number}  node {node}  host {host}  local rank {local}  device {device}  cpus {cpus}"
    yield ""
    common, own = _variables(plan)
    yield f"variables of every rank: {common}"
    yield f"variables of its own: {own}"
    for note in plan.notes:
        yield f"note: {note}"
    for node_rank, command in _commands(plan, options):
        yield f"node {node_rank}: {command}"


def _headline(plan: Plan) -> str:
    if plan.started_rank:
        return (
            f"rank {plan.node_rank} of {plan.world_size}, each with its own launcher: {shell_quote(plan.target.argv)}"
        )
    nodes = f"{plan.nnodes} node{'s' * (plan.nnodes > 1)}"
    return f"{plan.world_size} rank{'s' * (plan.world_size > 1)} on {nodes}: {shell_quote(plan.target.argv)}"


def _facts(plan: Plan) -> list[Fact]:
    if not plan.backend:
        return list(plan.facts)
    return [*plan.facts, Fact("process group", plan.backend, plan.init_method or "env://")]


def _variables(plan: Plan) -> tuple[str, str]:
    """Return the variables that are equal on all ranks, with their values, and the names of the others."""
    masked = [name for name in plan.device_masks[0] if name not in _PER_RANK_VARIABLES] if plan.device_masks else []
    own = [*_PER_RANK_VARIABLES, *masked, *["OMP_NUM_THREADS"] * (len({node.threads for node in plan.nodes}) > 1)]
    common = {name: value for name, value in plan.environment(plan.shown_ranks[0]).items() if name not in own}
    return " ".join(f"{name}={value}" for name, value in common.items()), " ".join(own)


def _row(plan: Plan, rank: Rank) -> tuple[str, ...]:
    """Return a rank's number, node, local rank, host, device and CPUs."""
    node, local = plan.node_and_local_rank(rank)
    cpus = format_cpulist(rank.cpus) if rank.cpus else "any"
    return str(rank.rank), "?" if node is None else str(node), str(local), rank.host or "?", rank.device, cpus


def _commands(plan: Plan, options: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """Yield the node rank and command of each other node."""
    for node in () if plan.started_rank or options is None else plan.nodes:
        if options is not None and node.node_rank != plan.node_rank:
            yield node.node_rank, node_command(plan, node.node_rank, options)


def _print_table(console: Console, plan: Plan, options: Sequence[str] | None) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def grid(*columns: str) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(columns))
        for name in columns:
            right = name in ("rank", "node", "local")
            table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
        return table

    def show(renderable: Table | Text) -> None:
        console.print(Padding(renderable, (0, 0, 0, 2)))

    console.print(Text(_headline(plan), "bold"))
    facts = grid()
    for fact in _facts(plan):
        unsure = fact.source in (SOURCE_ASSUMED, SOURCE_MISSING)
        facts.add_row(Text(fact.name), Text(fact.value), Text(fact.source, "yellow" if unsure else "dim"))
    show(facts)
    console.print()
    ranks = grid("rank", "node", "local", "host", "device", "cpus")
    for rank in plan.shown_ranks[:MAX_ROWS]:
        ranks.add_row(*map(Text, _row(plan, rank)), style="" if rank.node_rank == plan.node_rank else "dim")
    show(ranks)
    if len(plan.shown_ranks) > MAX_ROWS:
        show(Text(f"… and {len(plan.shown_ranks) - MAX_ROWS} more; piped, or with --json, all are printed", "dim"))
    console.print()
    common, own = _variables(plan)
    console.print(Text("variables of every rank", "bold"))
    show(Text(common, "dim"))
    show(Text(f"and of its own: {own}", "dim"))
    notes = Table.grid(padding=(0, 1, 0, 0))
    for note in plan.notes:
        notes.add_row(Text("note:", "yellow"), Text(note))
    console.print(notes)
    commands = list(_commands(plan, options))
    for node_rank, command in commands[:MAX_COMMANDS]:
        console.print(Text(f"\non node {node_rank}:", "bold"))
        console.print(Text(command), soft_wrap=True)  # one line, so that it can be copied
    if len(commands) > MAX_COMMANDS:
        console.print(Text(f"… and {len(commands) - MAX_COMMANDS} more; piped, all are printed", "dim"))
