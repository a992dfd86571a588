"""``ddplaunch run``: from what was typed to a plan, and from the plan to a dry run or a job.

What only a dry run, only a job, or only one over SSH needs is loaded when it is known to be that.
"""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.defaults import applied
from ddplaunch.cli.planning import Planning, make_plan, new_run_id
from ddplaunch.cli.reader import read
from ddplaunch.cli.rules import check_looks, check_time_limits, names_hosts
from ddplaunch.cli.say import complain, say_notes
from ddplaunch.cli.show import read_shown
from ddplaunch.cli.surroundings import check_token, one_log
from ddplaunch.cli.typed import TargetOptions, current_directory, find_target
from ddplaunch.errors import UsageError
from ddplaunch.output.voice import VOICE

if TYPE_CHECKING:
    import socket

    from ddplaunch.agent.policy import Shown
    from ddplaunch.cli.options import Options
    from ddplaunch.cli.typed import Remarks


def run(words: list[str]) -> int | None:
    """Plan the job, and print the plan or run it; return the exit code, None where the words ask for help.

    Raises:
        UsageError: the words make no sense.
    """
    if (typed := read(words)) is None:
        return None
    options, said = typed
    VOICE.for_machines = options.log_json
    listening: socket.socket | None = None
    of_project: tuple[str, ...] = ()
    try:
        options, of_project = applied(options, current_directory(), os.environ)
        planned = _planned(options, said, of_project)
        if isinstance(planned, int):
            return planned
        from ddplaunch.cli import launch

        rules, listening = launch.claim(planned[0])
        job = launch.prepared(*planned, rules, listening)
    except UsageError as error:
        from ddplaunch.cli import declining

        # At once, for the others may take their time to hear of it.
        hints = [*filter(None, (error.hint or "").splitlines()), *of_project]
        complain(error.message, "\n".join(hints) or None, error.exit_code)
        declining.tell(error, options, listening)
        return error.exit_code
    return job.run()


def _planned(options: Options, said: Remarks, of_project: tuple[str, ...]) -> tuple[Planning, Shown] | int:
    """Return the plan and whose output is shown; or the exit code of what was no job of this machine."""
    if options.as_json and not options.dry_run:
        raise UsageError("--json works only with --dry-run", "add --dry-run")
    target = find_target(TargetOptions(**options.taken(TargetOptions)), said.alike)
    check_token(options.token)
    notes = [*said.torchrun, *of_project]
    alike = [f"note: {said.alike}"] if said.alike else []
    if remote := names_hosts(options):
        from ddplaunch.cli import over_ssh

        hosts = over_ssh.read(options)
        if not options.dry_run:
            check_looks(options)
            check_time_limits(options)
            VOICE.run_id = options.run_id or new_run_id()
            say_notes(*notes, *alike)
            return over_ssh.start(hosts, options, target, VOICE.run_id)
        options, which = over_ssh.planned(hosts, options)
        notes.insert(0, which)
    planning = make_plan(options, target, notes, remote=remote)
    plan = planning.plan
    if remote:
        plan = over_ssh.on_hosts(plan, hosts, planning.options)
    VOICE.of(plan, numbered=plan.numbered)
    shown = read_shown(planning.options, plan)
    if plan.node_rank == 0 or not one_log(planning.finding):
        say_notes(*alike)
    if options.dry_run:
        from ddplaunch.cli.dry_run import print_plan

        print_plan(plan, planning.options, said.passed_on, remote=remote)
        return 0
    return planning, shown
