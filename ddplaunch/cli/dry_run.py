"""``ddplaunch run --dry-run``: the plan is printed, with the command for each other node."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli import over_ssh, sidecars
from ddplaunch.cli.say import echo
from ddplaunch.dataclass import replace

if TYPE_CHECKING:
    from ddplaunch.cli.options import Options
    from ddplaunch.plan.plan import Plan

_SPELLED_OUT = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "module", "no_python"}
"""What each node's command has in any case."""

_OF_THIS_NODE = {"stdin", "ui", "dry_run", "as_json", "token", *over_ssh.OWN_OPTIONS}


def print_plan(plan: Plan, options: Options, passed_on: str | None, *, remote: bool) -> None:
    """Print the plan, and ``passed_on``: the command that gives ``--dry-run`` to the target, if it may be meant so."""
    notes = list(plan.notes)
    if plan.node_rank == 0:
        notes += [f"beside rank 0: {each.command}" for each in sidecars.read(options, remote=remote)]
    if options.no_inspect:
        notes.append("--no-inspect: `ddplaunch stacks` cannot ask the ranks what they are doing")
    if plan.nnodes > 1 and not plan.started_rank:
        notes.append(f"nodes other than {plan.node_rank} are unknown and assumed to be like this one")
        if options.token:
            notes.append("the token is not printed: set DDPLAUNCH_TOKEN on every node")
    plan = replace(plan, notes=tuple(notes))
    if options.as_json:
        import json

        echo(f"{json.dumps(plan.to_json())}\n")
    else:
        from ddplaunch.console.layout import print_layout

        print_layout(plan, list(options.words(without=_SPELLED_OUT | _OF_THIS_NODE)))
    if passed_on:
        echo(f"--dry-run was read as ddplaunch's; to pass it on: {passed_on}\n", err=options.as_json)
