"""``ddplaunch run --dry-run``: prints the plan, with the command for each other node."""

from __future__ import annotations

import json
import sys

from msgspec.structs import replace

from ddplaunch.base.options import Options
from ddplaunch.base.text import join_names
from ddplaunch.cli.console_output import write_text
from ddplaunch.cli.plan_text import plain_lines
from ddplaunch.cli.planning import plan_zygote
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.options import DryRun, Nodes
from ddplaunch.system.plan.plan import Fact, Plan
from ddplaunch.system.target.target import TargetKind

MAX_NOTED = 5  # modules named in the note on modules that each rank imports itself; JSON has all

_EXPLICIT_OPTIONS = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "module", "no_python"}
"""Options that the command for each node has in any case."""


def print_plan(plan: Plan, options: Options, alternative_command: str | None, *, is_remote: bool) -> None:
    """Print the plan; then ``alternative_command``, which passes ``--dry-run`` to the target."""
    notes = list(plan.notes)
    if plugins := load_features().plugins:
        notes.append(f"plug-ins: {', '.join(plugins)} (DDPLAUNCH_PLUGINS=0 to ignore)")
    for name, feature in load_features():
        notes += load_features().call(name, feature.describe, options, plan, is_remote=is_remote) or ()
    if plan.nnodes > 1 and not plan.started_rank and not is_remote:
        notes.append(f"nodes other than {plan.node_rank} are unknown and assumed to be like this one")
        if options[Nodes].token:
            notes.append("the token is not printed: set DDPLAUNCH_TOKEN on every node")
    choice = plan_zygote(options, plan)
    if not is_remote and plan.target.kind is not TargetKind.PROGRAM:
        modules = join_names(choice.modules) if choice.forks else ""
        why = choice.source if choice.forks else choice.unsafe or choice.reason or "each rank is a new interpreter"
        plan = replace(plan, facts=(*plan.facts, Fact("preloaded", modules or "nothing", why)))
        noted = [f"{name} ({reason})" for name, reason in choice.excluded[:MAX_NOTED]]
        if (more := len(choice.excluded) - MAX_NOTED) > 0:
            noted.append(f"and {more} more")
        if noted:
            notes.append(f"imported in each rank: {', '.join(noted)}")
    on_node_zero = choice if plan.node_rank == 0 else plan_zygote(options, replace(plan, node_rank=0))
    plan = replace(plan.with_store(torch=on_node_zero.imports_torch), notes=tuple(notes))
    if options[DryRun].as_json:
        write_text(f"{json.dumps({**plan.to_json(), 'preload': choice.to_json()})}\n")
    else:
        _print_table_or_lines(plan, None if is_remote else list(options.to_argv(excluded=_EXPLICIT_OPTIONS)))
    if alternative_command:
        write_text(
            f"--dry-run was read as ddplaunch's; to pass it to the program: {alternative_command}\n",
            err=options[DryRun].as_json,
        )


def _print_table_or_lines(plan: Plan, options: list[str] | None) -> None:
    if sys.stdout.isatty():
        from ddplaunch.cli.plan_table import print_table

        print_table(plan, options)
    else:
        sys.stdout.write("".join(line + "\n" for line in plain_lines(plan, options)))
