"""``ddplaunch run``: from what was typed to a plan, and from the plan to a dry run or a job."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.cli.placement import place
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.agent.supervisor import Policy
    from ddplaunch.plan.plan import Machine, Plan, Request
    from ddplaunch.plan.target import Target


class _RunCommand(click.Command):
    """Knows which words are its own: click alone would take every option up to the first positional word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion looks at half a line
            return super().parse_args(ctx, args)
        options = {
            name: not (isinstance(param, click.Option) and (param.is_flag or param.count))
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("-")
        }
        placed = place(args, options)
        if placed.target is None and not {"-h", "--help"} & set(placed.ours):
            raise UsageError("there is no target", "name a script or a function: ddplaunch run train.py --nproc 4")
        target = [] if placed.target is None else [placed.target]
        return super().parse_args(ctx, [*placed.ours, "--", *target, *placed.program])


def _group(title: str) -> str:
    return f"\n\n{title}"


@click.command(
    cls=_RunCommand,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
        "max_content_width": 110,
    },
)
@click.option("-m", "--module", is_flag=True, help="The target is a module, run as `python -m` would.")
@click.option("--no-python", is_flag=True, help="The target is a program, not Python.")
@click.option(
    "--nproc", metavar="N", help="Processes on this node: a number, one per node like 8,8,4, auto, gpu or cpu. "
    "[default: auto, the visible GPUs, or 1]"
)  # fmt: skip
@click.option(
    "--gpus", metavar="LIST", help="GPUs to use, in order: indices as `ddplaunch devices` shows them, UUIDs, MIG."
)
@click.option("--oversubscribe", is_flag=True, help="Let ranks share GPUs.")
@click.option("--bind", type=click.Choice(["numa"]), help="Pin each rank to the CPUs beside its GPU.")
@click.option("--nnodes", type=int, default=1, show_default=True, metavar="N", help="Machines of the job.")
@click.option("--node-rank", type=int, metavar="I", help="Which of them this is, from 0; rank 0 is on node 0.")
@click.option("--master-addr", metavar="HOST", help="Node 0's address. [default on one node: 127.0.0.1]")
@click.option(
    "--master-port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Where rank 0's store listens; 0 is any free port. [default on one node: 0]",
)  # fmt: skip
@click.option(
    "--control", type=click.Choice(["none"]),
    help="How the nodes of a job hear of each other: not at all. Each starts its share on its own.",
)  # fmt: skip
@click.option(
    "--backend", metavar="NAME", help="Initialise the process group before the target runs: nccl, gloo, auto, …"
)
@click.option("--init-method", metavar="URL", help="How: env://, tcp://host:port or file:///path. [default: env://]")
@click.option(
    "--start", type=click.Choice(["auto", "zygote", "exec"]), default="auto", show_default=True,
    help="Fork ranks from one process that has imported torch, or start each afresh.",
)  # fmt: skip
@click.option("--preload", metavar="A,B", help="Modules to import before forking, instead of those that seem to pay.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start all ranks again after a failure, N times.",
)
@click.option(
    "--restart-backoff",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait before a restart, doubled while ranks keep dying early.",
)
@click.option(
    "--min-uptime",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Three attempts in a row shorter than this are a crash loop, and the last.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="What ranks have between SIGTERM and SIGKILL.",
)
@click.option(
    "--show",
    default="all",
    show_default=True,
    metavar="RANKS",
    help="Whose output is shown: all, none, or ranks like 0,3.",
)
@click.option(
    "--stdin", type=int, metavar="RANK", help="The rank that gets our terminal, for pdb. A single rank always does."
)
@click.option(
    "--log-dir", metavar="DIR", help="Keep a folder of this run in DIR: plan, events, output of each rank, failure."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print it as one JSON object.")
@click.argument("target", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(target: str, args: tuple[str, ...], **flags: Any) -> int:
    """Start a training job on this machine, or this machine's share of one.

    \b
    TARGET is one of
      train.py                  a script, as `python train.py`
      train.py:main             a function in a file, called in each rank
      package.module:function   a function in a module
      -m package.module         a module, as `python -m package.module`
      --no-python ./program     any program

    A function's parameters are filled by name: rank, local_rank, world_size, device and the like by ddplaunch,
    the others from its arguments (--lr 0.1).

    Options of ddplaunch stand before TARGET or right behind it; ARGS after -- are always the target's.
    """
    from ddplaunch.plan.plan import Request, make, missing_for_run
    from ddplaunch.plan.target import find

    if flags["as_json"] and not flags["dry_run"]:
        raise UsageError("--json is the form of a dry run", "add --dry-run")
    found = find(target, args, as_module=flags["module"], as_program=flags["no_python"], cwd=os.getcwd())
    _check_arguments(found)
    request = Request(**{name: flags[name] for name in Request.__dataclass_fields__})
    machine, notes = _look_at_machine(request)
    plan = make(request, found, machine, os.environ, _run_id())
    if flags["dry_run"]:
        _check_show(flags, plan)
        _print_plan(plan, notes, flags["as_json"])
        return 0
    missing = missing_for_run(plan)
    if missing:
        raise UsageError(
            f"{plan.nnodes} nodes start on their own and must agree, and {', '.join(missing)} is not given",
            "ddplaunch run … --dry-run prints the command for every node",
        )
    return _run(plan, _policy(flags, plan, found), notes)


def _check_arguments(target: Target) -> None:
    if target.signature is not None:
        from ddplaunch.agent.arguments import check

        check(target.signature, target.args)


def _look_at_machine(request: Request) -> tuple[Machine, list[str]]:
    """Ask the machine what it has and which of it is ours; the notes are for people."""
    import socket

    from ddplaunch.devices import read_hardware
    from ddplaunch.devices.visible import visible_gpus
    from ddplaunch.plan.hardware import TORCH_DEVICE_TYPE
    from ddplaunch.plan.layout import Slot
    from ddplaunch.plan.plan import Machine

    hardware = read_hardware()
    visible = visible_gpus(hardware, request.gpus, os.environ)
    slots = tuple(
        Slot(f"{TORCH_DEVICE_TYPE[each.gpu.vendor]}:{index}", each.gpu.name, each.gpu.cpus)
        for index, each in enumerate(visible.gpus)
    )
    machine = Machine(
        host=socket.gethostname(),
        allowed_cpus=hardware.cpu.allowed,
        physical_cpus=hardware.cpu.physical,
        numa=tuple(node.cpus for node in hardware.cpu.numa),
        slots=slots,
        slots_source=visible.source,
        variables=dict(visible.environ),
    )
    return machine, [*hardware.notes, *visible.notes]


def _run_id() -> str:
    import time

    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _policy(flags: dict[str, Any], plan: Plan, target: Target) -> Policy:
    from ddplaunch.agent.supervisor import Policy

    modules, asked = _modules(flags, plan, target)
    return Policy(
        modules=modules,
        asked=asked,
        grace=flags["grace"],
        max_restarts=flags["max_restarts"],
        restart_backoff=flags["restart_backoff"],
        min_uptime=flags["min_uptime"],
        show=_check_show(flags, plan),
        stdin=flags["stdin"],
        log_dir=flags["log_dir"],
        colour=_colour(),
    )


def _modules(flags: dict[str, Any], plan: Plan, target: Target) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the zygote imports, and which of it the user named. Nothing where ranks start by exec."""
    from ddplaunch.plan.preload import preloads
    from ddplaunch.plan.target import Kind

    if flags["start"] == "exec":
        if flags["preload"]:
            raise UsageError("--preload and --start exec contradict each other", "leave one of them out")
        return (), ()
    if target.kind is Kind.PROGRAM:
        if flags["start"] == "zygote" or flags["preload"]:
            raise UsageError(
                "--no-python runs a program, and only Python can be forked", "leave --start and --preload out"
            )
        return (), ()
    if flags["preload"]:
        asked = tuple(name for name in flags["preload"].split(",") if name)
        return asked, asked
    alone = len(plan.local_ranks) == 1 and not flags["max_restarts"]
    if flags["start"] == "auto" and (alone or sys.platform != "linux"):
        return (), ()
    return preloads(target), ()


def _check_show(flags: dict[str, Any], plan: Plan) -> frozenset[int] | None:
    """Read --show, and check --stdin, against the ranks that are here."""
    here = {rank.rank for rank in plan.local_ranks}
    known = (
        f"this node has ranks {min(here)} to {max(here)}" if len(here) > 1 else f"this node has rank {min(here)} only"
    )
    if flags["stdin"] is not None and flags["stdin"] not in here:
        raise UsageError(f"--stdin {flags['stdin']}: {known}", f"--stdin {min(here)}")
    text = flags["show"]
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    try:
        ranks = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--show {text} is no list of ranks", "all, none, or ranks like 0,3") from None
    if not ranks <= set(range(plan.world_size)):
        raise UsageError(f"--show {text}: {known}", "all, none, or ranks like 0,3")
    return ranks


def _colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _print_plan(plan: Plan, notes: list[str], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(plan.to_json() | {"notes": [*notes, *plan.notes]}))
        return
    from ddplaunch.console.layout import print_layout

    print_layout(plan, notes, _other_options())


def _other_options() -> list[str]:
    """The options typed here that another node's command repeats: all but those about nodes, counts and this dry run."""
    context = click.get_current_context()
    left_out = {
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "nproc",
        "dry_run",
        "as_json",
        "module",
        "no_python",
    }
    words: list[str] = []
    for param in context.command.params:
        name = param.name or ""
        source = context.get_parameter_source(name)
        if not isinstance(param, click.Option) or name in left_out or source is None or source.name != "COMMANDLINE":
            continue
        words.append(max(param.opts, key=len))
        if not param.is_flag:
            words.append(str(context.params[name]))
    return words


def _run(plan: Plan, policy: Policy, notes: list[str]) -> int:
    from ddplaunch.agent.supervisor import Supervisor

    for note in [*notes, *plan.notes]:
        click.echo(f"ddplaunch: {note}", err=True)
    if plan.nnodes > 1:
        click.echo("ddplaunch: --control none: the nodes do not hear of each other's failures", err=True)
    outcome = Supervisor(plan, policy, os.environ).run()
    if outcome.refused:
        raise UsageError(*outcome.refused)
    if outcome.verdict:
        from ddplaunch.console.failure import render_verdict

        click.echo(render_verdict(outcome.verdict, plan.nnodes), err=True, nl=False, color=None if _colour() else False)
    if outcome.remark:
        click.echo(f"ddplaunch: {outcome.remark}", err=True)
    if outcome.log_folder:
        click.echo(f"ddplaunch: kept in {outcome.log_folder}", err=True)
    return outcome.code
