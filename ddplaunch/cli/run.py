"""``ddplaunch run``: from what was typed to a plan, and from the plan to a dry run or a job.

What only a dry run, only a job, or only one over SSH needs is loaded when it is known to be that.
"""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.defaults import with_project_defaults
from ddplaunch.cli.planning import PlanInputs, new_run_id, prepare_plan
from ddplaunch.cli.reader import read_options
from ddplaunch.cli.rules import check_inspect_options, check_time_limits, uses_ssh
from ddplaunch.cli.say import print_error, print_notes
from ddplaunch.cli.show import read_show_rules
from ddplaunch.cli.surroundings import check_token, has_shared_log
from ddplaunch.cli.typed import TargetOptions, current_directory, resolve_target
from ddplaunch.errors import UsageError
from ddplaunch.output.voice import FORMATTER

if TYPE_CHECKING:
    import socket

    from ddplaunch.agent.policy import ShowRules
    from ddplaunch.cli.options import RunOptions
    from ddplaunch.cli.typed import ParseNotes


def run(words: list[str]) -> int | None:
    """Plan the job, and print the plan or run it; return the exit code, None where the words ask for help.

    Raises:
        UsageError: the words make no sense.
    """
    if (typed := read_options(words)) is None:
        return None
    options, said = typed
    FORMATTER.as_json = options.log_json
    listening: socket.socket | None = None
    of_project: tuple[str, ...] = ()
    try:
        options, of_project = with_project_defaults(options, current_directory(), os.environ)
        planned = _make_plan(options, said, of_project)
        if isinstance(planned, int):
            return planned
        from ddplaunch.cli import launch

        rules, listening = launch.bind_control_port(planned[0])
        job = launch.build_node_job(*planned, rules, listening)
    except UsageError as error:
        from ddplaunch.cli import declining

        # At once, for the others may take their time to hear of it.
        hints = [*filter(None, (error.hint or "").splitlines()), *of_project]
        print_error(error.message, "\n".join(hints) or None, error.exit_code)
        declining.notify_other_nodes(error, options, listening)
        return error.exit_code
    return job.run()


def _make_plan(
    options: RunOptions, said: ParseNotes, of_project: tuple[str, ...]
) -> tuple[PlanInputs, ShowRules] | int:
    """Return the plan and whose output is shown; or the exit code of what was no job of this machine."""
    if options.as_json and not options.dry_run:
        raise UsageError("--json works only with --dry-run", "add --dry-run")
    target = resolve_target(TargetOptions(**options.subset_for(TargetOptions)), said.lookalike_note)
    check_token(options.token)
    notes = [*said.torchrun_notes, *of_project]
    alike = [f"note: {said.lookalike_note}"] if said.lookalike_note else []
    if remote := uses_ssh(options):
        from ddplaunch.cli import over_ssh

        hosts = over_ssh.read_ssh_hosts(options)
        if not options.dry_run:
            check_inspect_options(options)
            check_time_limits(options)
            FORMATTER.run_id = options.run_id or new_run_id()
            print_notes(*notes, *alike)
            return over_ssh.run_on_hosts(hosts, options, target, FORMATTER.run_id)
        options, which = over_ssh.options_for_dry_run(hosts, options)
        notes.insert(0, which)
    planning = prepare_plan(options, target, notes, remote=remote)
    plan = planning.plan
    if remote:
        plan = over_ssh.on_hosts(plan, hosts, planning.options)
    FORMATTER.set_origin(plan, numbered=plan.has_node_rank)
    shown = read_show_rules(planning.options, plan)
    if plan.node_rank == 0 or not has_shared_log(planning.cluster_env):
        print_notes(*alike)
    if options.dry_run:
        from ddplaunch.cli.dry_run import print_plan

        print_plan(plan, planning.options, said.alternative_command, is_remote=remote)
        return 0
    return planning, shown
