"""``ddplaunch run``: from what was typed to a plan, and from the plan to a dry run or a job."""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.limits import need_processes
from ddplaunch.cli import over_ssh
from ddplaunch.cli.dry_run import print_plan
from ddplaunch.cli.policy import read_policy, read_shown, why_no_view
from ddplaunch.cli.rules import check_looks, check_time_limits, read_rules
from ddplaunch.cli.run_defaults import applied
from ddplaunch.cli.show import missing
from ddplaunch.cli.surroundings import check_token, one_log
from ddplaunch.cli.typed import current_directory, find_target
from ddplaunch.errors import UsageError
from ddplaunch.output.voice import VOICE

if TYPE_CHECKING:
    import socket

    from ddplaunch.cli.options import Options
    from ddplaunch.cli.typed import Remarks


def run(options: Options, said: Remarks) -> int:
    """Plan the job, and print the plan or run it; return the exit code."""
    VOICE.for_machines = options.log_json
    listening: socket.socket | None = None
    of_project: tuple[str, ...] = ()
    try:
        from ddplaunch.cli.planning import make_plan, new_run_id
        from ddplaunch.plan.rendezvous import check_store_file

        options, of_project = applied(options, current_directory(), os.environ)
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
            alike=said.alike,
        )
        check_token(options.token)
        hosts = over_ssh.read(options)
        alike = [f"note: {said.alike}"] if said.alike else []
        if hosts and not options.dry_run:
            check_looks(options)
            check_time_limits(options)
            VOICE.run_id = options.run_id or new_run_id()
            _say(*said.torchrun, *of_project, *alike)
            return over_ssh.start(hosts, options, target, VOICE.run_id)
        planning = make_plan(options, target, hosts, (*said.torchrun, *of_project))
        plan, completed, finding = planning.plan, planning.options, planning.finding
        VOICE.of(plan, numbered=plan.numbered)
        shown = read_shown(completed, plan)
        absent = missing(shown, plan)
        if plan.node_rank == 0 or not one_log(finding):
            _say(*alike)
        if options.dry_run:
            print_plan(plan, completed, said.passed_on, remote=bool(hosts))
            return 0
        need_processes()
        rules = read_rules(completed, plan.master_addr, plan.master_port, finding)
        from ddplaunch.control.link import check, listen_on_node_zero

        check(plan, rules)
        if plan.nnodes > 1:
            listening = listen_on_node_zero(plan, rules)
        if listening is None and not plan.numbered:
            plan = planning.plan_as(1)  # any other node, until node 0 gives it a rank
        check_store_file(plan.init_method, plan.run_id)
        _say(*plan.notes, *([absent] if absent else []))
        if no_view := why_no_view(completed):
            _say(no_view)
        if plan.nnodes > 1 and rules.port is None and not plan.started_rank:
            _say("--control none: nodes do not notice failures of other nodes")
        from ddplaunch.cli.launch import Job
        from ddplaunch.control.port import without_loopback
        from ddplaunch.plan.rendezvous import LOOPBACK

        if plan.master_addr == LOOPBACK and (no_way := without_loopback()):
            _say(no_way)
        job = Job(plan, read_policy(completed, plan, shown, finding), rules, listening)
    except UsageError as error:
        from ddplaunch.cli import complain, declining

        # At once, for the others may take their time to hear of it.
        hints = [*filter(None, (error.hint or "").splitlines()), *of_project]
        complain(error.message, "\n".join(hints) or None, error.exit_code)
        declining.tell(error, options, listening)
        return error.exit_code
    return job.run()


def _say(*notes: str) -> None:
    if not notes:
        return
    from ddplaunch.cli.say import say_note

    for note in notes:
        say_note(note)
