"""The dry run: which rank runs where, on what, with which variables, and how sure that is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddplaunch.plan.cpulist import format_cpulist
from ddplaunch.plan.plan import Plan, command_for

if TYPE_CHECKING:
    from rich.console import Console

_OWN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "DDPLAUNCH_DEVICE")
"""Variables that differ between ranks; the table shows what they are made of."""


def print_layout(plan: Plan, notes: Sequence[str], options: Sequence[str]) -> None:
    """Print the plan: a table in a terminal, the same facts as plain text elsewhere.

    Args:
        options: options that another node's command must repeat.
    """
    if sys.stdout.isatty():
        from rich.console import Console

        _print_table(Console(highlight=False), plan, notes, options)
    else:
        sys.stdout.write("".join(line + "\n" for line in plain(plan, notes, options)))


def plain(plan: Plan, notes: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield the plan as lines without colour or boxes, one rank a line."""
    yield from _heading(plan)
    yield ""
    for rank in plan.ranks:
        yield (
            f"rank {rank.rank}  node {rank.node_rank}  host {_host(rank.host)}  local rank {rank.local_rank}"
            f"  device {rank.device}  cpus {_cpus(rank.cpus)}"
        )
    yield ""
    yield "variables of every rank: " + " ".join(f"{name}={value}" for name, value in _common(plan).items())
    yield "variables of its own:    " + " ".join(_OWN)
    for note in [*notes, *plan.notes]:
        yield f"note: {note}"
    yield from _commands(plan, options)


def _heading(plan: Plan) -> Iterator[str]:
    nodes = f"{plan.nnodes} node{'s' * (plan.nnodes > 1)}"
    yield f"{plan.world_size} rank{'s' * (plan.world_size > 1)} on {nodes}: {' '.join(plan.target.argv)}"
    port = str(plan.master_port) if plan.master_port else "any free port, chosen at the start"
    yield f"store of rank 0: {plan.master_addr}, {port}"
    if plan.backend:
        yield f"process group: {plan.backend}, {plan.init_method or 'env://'}"
    for fact in plan.facts:
        yield f"{fact.name}: {fact.value} ({fact.source})"


def _common(plan: Plan) -> dict[str, str]:
    return {name: value for name, value in plan.environment(plan.ranks[0]).items() if name not in _OWN}


def _host(host: str | None) -> str:
    return host or "?"


def _cpus(cpus: Sequence[int] | None) -> str:
    return format_cpulist(cpus) if cpus else "any"


def _commands(plan: Plan, options: Sequence[str]) -> Iterator[str]:
    if plan.nnodes == 1:
        return
    others = [node.node_rank for node in plan.nodes if node.node_rank != plan.node_rank]
    yield ""
    yield "on the other nodes:"
    for node_rank in others:
        yield command_for(plan, node_rank, options)


_MOST_ROWS = 64


def _print_table(console: Console, plan: Plan, notes: Sequence[str], options: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    first, *rest = _heading(plan)
    console.print(f"[bold]{escape(first)}[/]")
    for line in rest:
        console.print(f"  {escape(line)}", style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rank", "node", "local", "host", "device", "cpus"):
        table.add_column(name, justify="right" if name in ("rank", "node", "local") else "left", no_wrap=name != "cpus")
    shown = plan.ranks if plan.world_size <= _MOST_ROWS else plan.ranks[:_MOST_ROWS]
    for rank in shown:
        here = rank.node_rank == plan.node_rank
        table.add_row(
            str(rank.rank),
            str(rank.node_rank),
            str(rank.local_rank),
            escape(_host(rank.host)),
            rank.device,
            _cpus(rank.cpus),
            style="" if here else "dim",
            end_section=rank is shown[-1],
        )
    console.print()
    console.print(table)
    if len(shown) < plan.world_size:
        console.print(f"… and {plan.world_size - len(shown)} more; piped, or with --json, all are printed", style="dim")
    console.print()
    console.print("[bold]variables of every rank[/]")
    console.print("  " + escape(" ".join(f"{name}={value}" for name, value in _common(plan).items())), style="dim")
    console.print(f"  and of its own: {' '.join(_OWN)}", style="dim")
    for note in [*notes, *plan.notes]:
        console.print(f"[yellow]note:[/] {escape(note)}")
    for line in _commands(plan, options):
        console.print(escape(line), soft_wrap=True, style="bold" if line.endswith(":") else "")
