"""``ddplaunch run``: from what was typed to a plan, and from the plan to a dry run or a job."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import TYPE_CHECKING

import click

from ddplaunch.cli import over_ssh
from ddplaunch.cli.dry_run import print_plan
from ddplaunch.cli.options import COMMON, LOG_JSON, PARAMS, SECTIONS, read
from ddplaunch.cli.policy import read_policy, read_shown, why_no_view
from ddplaunch.cli.rules import check_time_limits, read_rules
from ddplaunch.cli.surroundings import check_token, one_log
from ddplaunch.cli.target_command import SETTINGS, TargetCommand, find_target, remarks
from ddplaunch.errors import UsageError
from ddplaunch.output.voice import VOICE

if TYPE_CHECKING:
    import socket


class _RunCommand(TargetCommand):
    sections = SECTIONS
    common = COMMON
    examples = (
        ("4 ranks on this machine", "ddplaunch run --nproc 4 train.py --lr 0.1"),
        ("a function, called in each rank; one rank for each GPU", "ddplaunch run train.py:main --lr 0.1"),
        (
            "2 machines; type the same on the other one, with --node-rank 1",
            "ddplaunch run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 train.py",
        ),
        ("2 hosts by SSH, 4 ranks on each", "ddplaunch run --hosts n1:4,n2:4 train.py"),
        ("print what would run where; start nothing", "ddplaunch run --dry-run --nproc 4 train.py"),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # An error in these words is to be said in the form that they ask for; what they mean is known only afterwards.
        typed = "--log-json" in takewhile(lambda word: word != "--", args)
        VOICE.for_machines = typed or os.environ.get(LOG_JSON, "0") not in ("", "0")
        return super().parse_args(ctx, args)


@click.command(cls=_RunCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=PARAMS)
def run(**_: object) -> int:
    """Start a training job on this machine, or this machine's share of one.

    \b
    TARGET is one of
      train.py                  a script, as for `python train.py`
      train.py:main             a function in a file, called in each rank
      package.module:function   a function in a module
      -m package.module         a module, as for `python -m package.module`
      --no-python ./program     any program

    Options come before TARGET, and arguments of the target after it. Directly after TARGET, --nproc, --nnodes,
    --node-rank, --master-addr, --master-port and --dry-run are still options of ddplaunch.

    A function gets rank, local_rank, world_size, device and the like by the names of its parameters, the others
    from its arguments: --lr 0.1. Options of torchrun work too: docs/torchrun.md.
    """
    said = remarks()
    options = read(click.get_current_context(), said.from_variables)
    VOICE.for_machines = options.log_json
    listening: socket.socket | None = None
    try:
        from ddplaunch.cli.planning import make_plan, new_run_id
        from ddplaunch.plan.rendezvous import check_store_file

        if options.as_json and not options.dry_run:
            raise UsageError("--json works only with --dry-run", "add --dry-run")
        target = find_target(
            options.target,
            options.args,
            module=options.module,
            no_python=options.no_python,
            pass_local_rank=options.pass_local_rank,
            start=options.start,
            preload=options.preload,
        )
        check_token(options.token)
        hosts = over_ssh.read(options)
        alike = [f"note: {said.alike}"] if said.alike else []
        if hosts and not options.dry_run:
            check_time_limits(options)
            VOICE.run_id = options.run_id or new_run_id()
            _say(*said.torchrun, *alike)
            return over_ssh.start(hosts, options, target, VOICE.run_id)
        plan, completed, finding, plan_as = make_plan(options, target, hosts, said.torchrun)
        VOICE.of(plan, numbered=plan.numbered)
        shown = read_shown(completed, plan)
        if plan.node_rank == 0 or not one_log(finding):
            _say(*alike)
        if options.dry_run:
            print_plan(plan, completed, said.passed_on, remote=bool(hosts))
            return 0
        rules = read_rules(completed, plan.master_addr, plan.master_port, finding)
        rules.check(plan)
        if plan.nnodes > 1:
            from ddplaunch.control.link import listen_on_node_zero

            listening = listen_on_node_zero(plan, rules)
        if listening is None and not plan.numbered:
            plan = plan_as(1)  # any other node, until node 0 gives it a rank
        check_store_file(plan.init_method, plan.run_id)
        _say(*plan.notes)
        if no_view := why_no_view(completed):
            _say(no_view)
        if plan.nnodes > 1 and rules.port is None and not plan.started_rank:
            _say("--control none: nodes do not notice failures of other nodes")
        from ddplaunch.cli.launch import Job

        job = Job(plan, read_policy(completed, plan, shown, many_start=finding is not None), rules, listening)
    except UsageError as error:
        from ddplaunch.cli import complain, declining

        # At once, for the others may take their time to hear of it.
        complain(error.message, error.hint, error.exit_code)
        declining.tell(error, options, listening)
        return error.exit_code
    return job.run()


def _say(*notes: str) -> None:
    if not notes:
        return
    from ddplaunch.cli.say import say_note

    for note in notes:
        say_note(note)
