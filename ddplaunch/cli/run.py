"""``ddplaunch run``: from what was typed to a plan, and from the plan to a dry run or a job."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.cli import over_ssh, show
from ddplaunch.cli.options import AUTO, SECTIONS, as_typed, options
from ddplaunch.cli.surroundings import (
    address_comes_late,
    check_token,
    look_around,
    one_log,
    place_of,
    surroundings_notes,
)
from ddplaunch.cli.target_command import ALIKE, NOTES, PASSED_ON, SETTINGS, TargetCommand, find_target
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    import socket

    from ddplaunch.agent.policy import Policy
    from ddplaunch.agent.sidecar import Sidecar
    from ddplaunch.cli.launch import Job
    from ddplaunch.control.rules import Rules
    from ddplaunch.output.show import Shown
    from ddplaunch.plan.plan import Machine, Plan, Request


QUIET = 5.0
"""Seconds that nodes which somebody starts all at once have to find each other before anything is told of it."""


class _RunCommand(TargetCommand):
    sections = SECTIONS


@click.command(
    cls=_RunCommand,
    options_metavar="[OPTIONS]",
    context_settings=SETTINGS,
)
@options
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

    Options stand before TARGET. Behind it only those that say where ranks run (such as --nproc) and the dry run are
    ddplaunch's, and only right behind it; everything else there is the target's. Before TARGET the options of
    torchrun are read too, and its PET_* variables: docs/torchrun.md.
    """
    try:
        ready = _prepared(target, args, flags)
    except UsageError as error:
        from ddplaunch.cli import complain, declining

        complain(error.message, error.hint)  # at once, for the others may take their time to hear of it
        declining.tell(error, flags)
        return error.exit_code
    return ready if isinstance(ready, int) else ready.run()


def _prepared(target: str, args: tuple[str, ...], flags: dict[str, Any]) -> int | Job:
    """All that can be refused before anything starts; an exit code where nothing is to be started here."""
    from ddplaunch.plan.plan import Request, make

    if flags["as_json"] and not flags["dry_run"]:
        raise UsageError("--json is the form of a dry run", "add --dry-run")
    found = find_target(target, args, flags)
    check_token(flags["token"])
    hosts = over_ssh.read(flags)
    said = click.get_current_context().meta.get(NOTES, ())
    if hosts and not flags["dry_run"]:
        for note in said:
            click.echo(f"ddplaunch: {note}", err=True)
        _say_what_is_alike()
        return over_ssh.start(hosts, flags, found, flags["run_id"] or _run_id())
    over = (over_ssh.describe(hosts, flags),) if hosts else ()
    surroundings = look_around(flags)
    _check_nodes(flags)
    flags["min_nodes"], flags["nnodes"] = flags["nnodes"]
    flags["place"], flags["surroundings"] = place_of(surroundings), surroundings and surroundings.cluster
    flags["numbered"] = flags["node_rank"] != AUTO
    if not flags["numbered"]:
        flags["node_rank"] = 0  # for now
    flags["one_log"] = one_log(surroundings)
    flags["address_comes_late"] = address_comes_late(surroundings, flags)
    request = Request(**{name: flags[name] for name in Request.__dataclass_fields__})
    machine, notes = _look_at_machine(request, runs_here=not hosts)
    notes = (*over, *said, *notes)
    if surroundings:
        notes = (*surroundings_notes(surroundings), *notes)
    plan = make(request, found, machine, os.environ, flags["run_id"] or _run_id(), notes)
    shown = show.read(flags["show"], plan)
    _check_stdin(flags["stdin"], plan)
    if plan.node_rank == 0 or not flags["one_log"]:
        _say_what_is_alike()
    if flags["dry_run"]:
        _print_plan(plan, flags, remote=bool(hosts))
        return 0
    rules = _rules(flags, plan)
    if rules.interface:
        from ddplaunch.control.route import check_interface

        check_interface(rules.interface)
    _check_several(plan, rules)
    listening = None
    if not plan.numbered:
        listening = _claimed(rules)
        if listening is None:  # any other node, until it is told which
            plan = make(replace(request, node_rank=1), found, machine, os.environ, plan.run_id, notes)
    elif plan.node_rank == 0 and rules.port is not None:
        from ddplaunch.control.link import listen
        from ddplaunch.control.port import Port

        if plan.hosts_store:  # where both are taken, the master port is the one to name
            Port(plan.master_addr, plan.master_port, nnodes=plan.nnodes).close()
        listening = listen(rules)
    flags["listening"] = listening
    _check_store_file(plan)
    for note in plan.notes:
        click.echo(f"ddplaunch: {note}", err=True)
    if plan.nnodes > 1 and rules.port is None and not plan.place:
        click.echo("ddplaunch: --control none: the nodes do not hear of each other's failures", err=True)
    from ddplaunch.cli.launch import Job

    return Job(plan, _policy(flags, plan, shown), rules, listening)


# ---------------------------------------------------------------------------------------------------------- checks


def _check_nodes(flags: dict[str, Any]) -> None:
    """Refuse what contradicts --nnodes."""
    first, last = flags["nnodes"]
    if flags["grow"] and first == last:
        raise UsageError(f"--grow needs a range of nodes, and --nnodes is {last}", f"--nnodes {last}:{last + 1}")
    if flags["control"] == "none" and first != last:
        raise UsageError(f"--nnodes {first}:{last} needs nodes that hear of each other", "leave --control none out")
    if flags["control"] == "none" and flags["node_rank"] == AUTO:
        raise UsageError("--node-rank auto needs nodes that hear of each other", "leave --control none out")


def _check_several(plan: Plan, rules: Rules) -> None:
    """What a node of several must know before it can start."""
    if plan.nnodes == 1:
        return
    if rules.port is None:
        if plan.missing:
            *first, last = plan.missing
            names = f"{', '.join(first)} and {last}" if first else last
            raise UsageError(
                f"a job on {plan.nnodes} nodes with --control none needs {names}",
                "ddplaunch run … --dry-run writes the command for each node",
            )
        if plan.max_restarts:
            raise UsageError(
                f"--max-restarts {plan.max_restarts} with --control none: each node would restart alone",
                "leave one of them out",
            )
        return
    others = f"1 to {plan.nnodes - 1}" if plan.nnodes > 2 else "1"
    if "--node-rank" in plan.missing:
        rest = f"{others} on the other{'s' * (plan.nnodes > 2)}"
        raise UsageError(
            f"--node-rank is missing: which of the {plan.nnodes} nodes is this?",
            f"--node-rank 0 on the node whose address is --master-addr, {rest}\n"
            "--node-rank auto numbers them as they join",
        )
    from ddplaunch.control.route import check_is_ours, own_addresses

    if "--master-addr" in plan.missing:
        if plan.node_rank:
            raise UsageError(
                f"--master-addr is missing: where is node 0 of these {plan.nnodes} nodes?",
                "`hostname -I` on node 0 shows its addresses; give the same one on every node",
            )
        example = next(own_addresses(), "10.0.0.1")
        raise UsageError(
            f"--master-addr is missing: where do the others of {plan.nnodes} nodes reach this one?",
            f"--master-addr {example}, which is this machine's, on every node",
        )
    if plan.node_rank == 0 and plan.numbered and not rules.address_comes_late:
        check_is_ours(plan.master_addr)


def _claimed(rules: Rules) -> socket.socket | None:
    """Be node 0 where nobody typed which is: the launcher on the machine of that address, there the first of several.

    Returns:
        The listening control port; None where another is node 0.
    """
    from ddplaunch.control.port import claim
    from ddplaunch.control.route import is_ours

    assert rules.port is not None
    ours = rules.address == os.uname().nodename or is_ours(rules.address)
    return claim(rules.port) if ours else None


def _check_stdin(rank: int | None, plan: Plan) -> None:
    here = [rank.rank for rank in plan.local_ranks]
    if rank is not None and plan.nnodes == 1 and rank not in here:
        raise UsageError(f"--stdin {rank}: this node has {show.ranks(here[0], here[-1])}", f"--stdin {here[0]}")


def _check_store_file(plan: Plan) -> None:
    """Try to write where ``--init-method file://`` says: root may write anywhere, as far as permissions go."""
    if plan.init_method is None or not plan.init_method.startswith("file://"):
        return
    probe = os.path.join(os.path.dirname(plan.init_method.removeprefix("file://")), f".{plan.run_id}.{os.getpid()}")
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(probe)
    except OSError as error:
        raise UsageError(
            f"--init-method {plan.init_method} cannot be written: {error.strerror}",
            "--init-method file:///tmp/store",
        ) from None


# ---------------------------------------------------------------------------------------------------------- planning


def _look_at_machine(request: Request, *, runs_here: bool) -> tuple[Machine, tuple[str, ...]]:
    """Ask the machine what it has and which of it is ours; the notes are for people."""
    from ddplaunch.devices import read_hardware
    from ddplaunch.devices.given import check_given
    from ddplaunch.devices.visible import alone, visible_gpus
    from ddplaunch.plan.layout import Slot
    from ddplaunch.plan.plan import Machine

    hardware = read_hardware()
    visible = visible_gpus(hardware, request.gpus, os.environ)
    if runs_here:
        check_given(hardware, visible, os.environ, gpus=request.gpus, nproc=request.nproc, backend=request.backend)
    machine = Machine(
        host=os.uname().nodename,
        allowed_cpus=hardware.cpu.allowed,
        physical_cpus=min(hardware.cpu.physical, hardware.cpu.usable),
        usable_cpus=hardware.cpu.usable,
        numa=tuple(node.cpus for node in hardware.cpu.numa),
        slots=tuple(
            Slot(device, each.gpu.name, each.gpu.cpus)
            for device, each in zip(visible.devices, visible.gpus, strict=True)
        ),
        slots_source=visible.source,
        bound=len(hardware.cpu.allowed) < (os.cpu_count() or 1),
        variables=visible.environ,
        masks=alone(visible, os.environ) if request.virtual_local_rank else (),
    )
    return machine, (*hardware.notes, *visible.notes)


def _say_what_is_alike() -> None:
    if alike := click.get_current_context().meta.get(ALIKE):
        click.echo(f"ddplaunch: {alike}", err=True)


def _run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _print_plan(plan: Plan, flags: dict[str, Any], *, remote: bool) -> None:
    if plan.node_rank == 0:
        beside = (f"beside rank 0: {each.command}" for each in _sidecars(flags, remote=remote))
        plan = replace(plan, notes=(*plan.notes, *beside))
    if plan.nnodes > 1 and not plan.place:
        assumed = f"of the nodes other than {plan.node_rank} nothing is known: they are assumed to be like this one"
        token = ["the token is not printed: set DDPLAUNCH_TOKEN on every node"] if flags["token"] else []
        plan = replace(plan, notes=(*plan.notes, assumed, *token))
    if flags["as_json"]:
        import json

        click.echo(json.dumps(plan.to_json()))
    else:
        from ddplaunch.console.layout import print_layout

        print_layout(plan, _other_options())
    if passed_on := click.get_current_context().meta.get(PASSED_ON):
        click.echo(passed_on, err=flags["as_json"])


_SPELLED_OUT = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "module", "no_python"}
_OF_THIS_NODE = {"stdin", "dry_run", "as_json", "token", *over_ssh.OWN_OPTIONS}


def _other_options() -> list[str]:
    """The options typed here that another node's command repeats, beside those that it spells out in any case."""
    context = click.get_current_context()
    words: list[str] = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is None or source.name != "COMMANDLINE" or param.name in _SPELLED_OUT | _OF_THIS_NODE:
            continue
        if isinstance(param, click.Option):
            words += as_typed(param, context.params[param.name or ""])
    return words


# ---------------------------------------------------------------------------------------------------------- running


def _sidecars(flags: dict[str, Any], *, remote: bool = False) -> tuple[Sidecar, ...]:
    if not (flags["sidecar"] or flags["tensorboard"] is not None):
        return ()
    from ddplaunch.cli import sidecars

    return sidecars.read(flags["tensorboard"], flags["sidecar"], remote=remote)


def _policy(flags: dict[str, Any], plan: Plan, shown: Shown) -> Policy:
    from ddplaunch.agent.policy import Policy
    from ddplaunch.console import colour_wanted
    from ddplaunch.output.sink import PATIENCE

    modules, asked = _modules(flags, plan)
    by_ssh = over_ssh.STARTED in os.environ
    return Policy(
        modules=modules,
        asked=asked,
        show=shown,
        stdin=flags["stdin"],
        log_dir=flags["log_dir"],
        patience=over_ssh.PATIENCE if by_ssh else PATIENCE,
        quiet=QUIET if by_ssh or flags["surroundings"] else 0.0,
        preempt_signal=flags["preempt_signal"],
        preempt_forward=flags["preempt_forward"],
        colour=colour_wanted(),
        sidecars=_sidecars(flags) if plan.node_rank == 0 else (),
    )


def _modules(flags: dict[str, Any], plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the zygote imports, and which of it the user named. Nothing where ranks start by exec."""
    from ddplaunch.target.preload import preloads

    if flags["preload"]:
        asked = tuple(flags["preload"].split(","))
        return asked, asked
    alone = len(plan.local_ranks) == 1 and not flags["max_restarts"]
    if flags["start"] == "exec" or (flags["start"] == "auto" and (alone or sys.platform != "linux")):
        return (), ()
    return preloads(plan.target), ()


def _rules(flags: dict[str, Any], plan: Plan) -> Rules:
    from ddplaunch.control.rules import Rules

    named = {name: flags[name] for name in Rules.__dataclass_fields__ if name in flags}
    if plan.nnodes == 1 or flags["control"] == "none":
        return Rules(**{**named, "min_nodes": 1, "max_nodes": 1})
    port = flags["control_port"] or plan.master_port + 1
    if port > 65535:
        raise UsageError(f"--master-port {plan.master_port} leaves no port for the control", "give a --control-port")
    if port == plan.master_port:
        raise UsageError(f"--control-port {port} is the master port too", "leave --control-port out, or give another")
    return Rules(**named, max_nodes=plan.nnodes, address=plan.master_addr, port=port)
