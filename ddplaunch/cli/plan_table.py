"""Prints a plan as tables on a terminal, for --dry-run; imported only there, as rich takes longer than the plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.plan_text import (
    PROGRAM_HEADS,
    describe_variables,
    format_headline,
    format_row,
    list_commands,
    list_facts,
    list_programs,
)
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rendezvous import SOURCE_ASSUMED, SOURCE_MISSING

MAX_ROWS, MAX_COMMANDS = 64, 8
"""On a terminal; piped, or with ``--json``, everything is printed."""


def print_table(plan: Plan, options: Sequence[str] | None) -> None:
    """Print the plan; ``options`` are repeated in the other nodes' commands; None: the other nodes need no command."""
    console = Console(highlight=False, no_color=not is_colour_allowed())

    def make_table(*columns: str) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(columns))
        for name in columns:
            right = name in ("rank", "node", "local")
            table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
        return table

    def show(renderable: Table | Text) -> None:
        console.print(Padding(renderable, (0, 0, 0, 2)))

    console.print(Text(format_headline(plan), "bold"))
    facts = make_table()
    for fact in list_facts(plan):
        unsure = fact.source in (SOURCE_ASSUMED, SOURCE_MISSING)
        facts.add_row(Text(fact.name), Text(fact.value), Text(fact.source, "yellow" if unsure else "dim"))
    show(facts)
    console.print()
    if programs := list_programs(plan):
        beside = make_table(*PROGRAM_HEADS)
        for row in programs:
            beside.add_row(*map(Text, row))
        show(beside)
        console.print()
    ranks = make_table("rank", "node", "local", "host", "device", "cpus")
    for rank in plan.shown_ranks[:MAX_ROWS]:
        ranks.add_row(*map(Text, format_row(plan, rank)), style="" if rank.node_rank == plan.node_rank else "dim")
    show(ranks)
    if len(plan.shown_ranks) > MAX_ROWS:
        show(Text(f"… and {len(plan.shown_ranks) - MAX_ROWS} more; piped, or with --json, all are printed", "dim"))
    console.print()
    common, own = describe_variables(plan)
    console.print(Text("variables of every rank", "bold"))
    show(Text(common, "dim"))
    show(Text(f"and of its own: {own}", "dim"))
    notes = Table.grid(padding=(0, 1, 0, 0))
    for note in plan.notes:
        notes.add_row(Text("note:", "yellow"), Text(note))
    console.print(notes)
    commands = list(list_commands(plan, options))
    for node_rank, command in commands[:MAX_COMMANDS]:
        console.print(Text(f"\non node {node_rank}:", "bold"))
        console.print(Text(command), soft_wrap=True)  # one line, so that it can be copied
    if len(commands) > MAX_COMMANDS:
        console.print(Text(f"… and {len(commands) - MAX_COMMANDS} more; piped, all are printed", "dim"))
