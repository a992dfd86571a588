"""``ddplaunch run``: parses the options, makes the plan, and prints it or runs the job.

Modules that only a dry run, a job on this machine, or a job over SSH needs are imported when that is known.
"""

from __future__ import annotations

import os
import socket

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.cluster_detection import check_token, has_shared_log
from ddplaunch.cli.config_defaults import with_project_defaults
from ddplaunch.cli.console_output import print_error, print_notes
from ddplaunch.cli.job_config_options import check_inspect_options, check_time_limits, uses_ssh
from ddplaunch.cli.option_reader import read_options
from ddplaunch.cli.planning import PlanInputs, new_run_id, prepare_plan
from ddplaunch.cli.run_options import RunOptions
from ddplaunch.cli.show_option import read_show_rules
from ddplaunch.cli.target_args import ParseNotes, TargetOptions, current_directory, resolve_target
from ddplaunch.core.node_config import ShowRules
from ddplaunch.core.output.log_message import FORMATTER


def run(words: list[str]) -> int | None:
    """Plan the job, and print the plan or run it; return the exit code, or None if the words ask for help.

    Raises:
        UsageError: an option or value is invalid.
    """
    if (parsed := read_options(words)) is None:
        return None
    options, parse_notes = parsed
    FORMATTER.as_json = options.log_json
    listener_socket: socket.socket | None = None
    file_notes: tuple[str, ...] = ()
    try:
        options, file_notes = with_project_defaults(options, current_directory(), os.environ)
        planned = _make_plan(options, parse_notes, file_notes)
        if isinstance(planned, int):
            return planned
        from ddplaunch.cli import job_launch

        job_config, listener_socket = job_launch.bind_control_port(planned[0])
        job = job_launch.build_node_job(*planned, job_config, listener_socket)
    except UsageError as error:
        from ddplaunch.cli import declining

        # Before notifying the other nodes, which may take a while.
        hints = [*filter(None, (error.hint or "").splitlines()), *file_notes]
        print_error(error.message, "\n".join(hints) or None, error.exit_code)
        declining.notify_other_nodes(error, options, listener_socket)
        return error.exit_code
    return job.run()


def _make_plan(
    options: RunOptions, parse_notes: ParseNotes, file_notes: tuple[str, ...]
) -> tuple[PlanInputs, ShowRules] | int:
    """Return the plan and the ranks whose output is shown; after a dry run or a job over SSH, the exit code."""
    if options.as_json and not options.dry_run:
        raise UsageError("--json works only with --dry-run", "add --dry-run")
    target = resolve_target(TargetOptions(**options.subset_for(TargetOptions)), parse_notes.lookalike_note)
    check_token(options.token)
    notes = [*parse_notes.torchrun_notes, *file_notes]
    lookalikes = [f"note: {parse_notes.lookalike_note}"] if parse_notes.lookalike_note else []
    if remote := uses_ssh(options):
        from ddplaunch.features.ssh import ssh_launch

        hosts = ssh_launch.read_ssh_hosts(options)
        if not options.dry_run:
            check_inspect_options(options)
            check_time_limits(options)
            FORMATTER.run_id = options.run_id or new_run_id()
            print_notes(*notes, *lookalikes)
            return ssh_launch.run_on_hosts(hosts, options, target, FORMATTER.run_id)
        options, host_note = ssh_launch.options_for_dry_run(hosts, options)
        notes.insert(0, host_note)
    planning = prepare_plan(options, target, notes, remote=remote)
    plan = planning.plan
    if remote:
        plan = ssh_launch.on_hosts(plan, hosts, planning.options)
    FORMATTER.set_origin(plan, numbered=plan.has_node_rank)
    show_rules = read_show_rules(planning.options, plan)
    if plan.node_rank == 0 or not has_shared_log(planning.cluster_env):
        print_notes(*lookalikes)
    if options.dry_run:
        from ddplaunch.cli.dry_run import print_plan

        print_plan(plan, planning.options, parse_notes.alternative_command, is_remote=remote)
        return 0
    return planning, show_rules
