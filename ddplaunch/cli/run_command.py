"""``ddplaunch run``: parses the options, makes the plan, and prints it or runs the job.

Modules that only a dry run or a job on this machine needs are imported when that is known.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from itertools import takewhile

import click
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.cli.argv_splitter import HELP, ArgvGrammar, split_argv
from ddplaunch.cli.click_commands import print_left_out_plugins
from ddplaunch.cli.cluster_detection import check_token, has_shared_log
from ddplaunch.cli.config_defaults import with_project_defaults
from ddplaunch.cli.console_output import print_error, print_notes
from ddplaunch.cli.dry_run import print_plan
from ddplaunch.cli.job_config_options import build_job_config, check_node_options
from ddplaunch.cli.option_variables import drop_option_variables, unknown_variable_notes
from ddplaunch.cli.planning import PreparedPlan, new_run_id, prepare_plan
from ddplaunch.cli.run_options import COMMON_OPTIONS, GROUPS, PARAMS, SECTIONS
from ddplaunch.cli.show_option import read_show_rules
from ddplaunch.cli.target_args import (
    ParseNotes,
    check_target,
    make_option_lookup,
    make_parse_notes,
    require_current_folder,
    resolve_target,
    translate_torchrun,
)
from ddplaunch.cli.target_command import SETTINGS, TargetCommand, spellings
from ddplaunch.core.feature import ReplacementLauncher
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.node_config import ShowRules
from ddplaunch.core.options import LOG_JSON_VARIABLE, DryRun, Logging, Nodes
from ddplaunch.core.output.log_message import FORMATTER
from ddplaunch.system.target.spawn_call import spawn_call_note
from ddplaunch.system.target.target import Target


class _RunCommand(TargetCommand):
    """The click command ``run``: splits the command line at the target, then lets click parse the options before it."""

    sections = SECTIONS
    common = COMMON_OPTIONS
    examples = (
        ("4 ranks on this machine", "ddplaunch run --nproc 4 train.py --lr 0.1"),
        ("a function, called in each rank; one rank per GPU", "ddplaunch run train.py:main --lr 0.1"),
        (
            "2 machines; run the same on the other one, with --node-rank 1",
            "ddplaunch run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 train.py",
        ),
        ("2 hosts over SSH, 4 ranks on each", "ddplaunch run --hosts n1:4,n2:4 train.py"),
        ("print the plan without starting anything", "ddplaunch run --dry-run --nproc 4 train.py"),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion of an unfinished line
            return super().parse_args(ctx, args)
        # Before parsing, so that errors of parsing are written in the requested form too.
        typed_json = "--log-json" in takewhile(lambda word: word != "--", args)
        FORMATTER.as_json = typed_json or os.environ.get(LOG_JSON_VARIABLE, "0") not in ("", "0")
        print_left_out_plugins()
        drop_option_variables(os.environ)
        known = spellings(self.get_params(ctx))
        args = load_features().rewrite_words(args, known)
        translation = translate_torchrun(args, known, os.environ)
        line = split_argv(translation, ArgvGrammar(known), make_option_lookup())
        if requested := [word for word in line.options if word in HELP]:
            return super().parse_args(ctx, requested[:1])
        check_target(line, known, "run")
        ctx.obj = make_parse_notes(line, translation, unknown_variable_notes(os.environ))
        try:
            return super().parse_args(ctx, [*line.options, "--", line.target or "", *line.program_args])
        except click.BadOptionUsage as error:
            raise UsageError(error.format_message().rstrip(".")) from None


@click.command(cls=_RunCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=PARAMS)
@click.pass_context
def run(ctx: click.Context, /, **_: object) -> int:
    """Run a training job on this machine, or this machine's part of a multi-node job.

    \b
    TARGET is one of
      train.py                  a script, as for `python train.py`
      train.py:main             a function in a file, called in each rank
      package.module:function   a function in a module
      -m package.module         a module, as for `python -m package.module`
      --no-python ./program     any program

    Options come before TARGET, and arguments of the target after it. Directly after TARGET, --nproc, --nnodes,
    --node-rank, --master-addr, --master-port and --dry-run are still options of ddplaunch.

    A function receives rank, local_rank, world_size, device and others by parameter name, and its other parameters
    from the arguments: --lr 0.1. Options of torchrun work too: `ddplaunch help torchrun`. Variables set options as
    well: DDPLAUNCH_NPROC=4 is --nproc 4.
    """
    parse_notes = ctx.find_object(ParseNotes) or ParseNotes()
    options = Options.from_click(GROUPS, ctx, parse_notes.from_variables)
    FORMATTER.as_json = options[Logging].log_json
    listener_socket: socket.socket | None = None
    file_notes: tuple[str, ...] = ()
    with ExitStack() as undo:  # called unless the job starts
        try:
            options, file_notes = with_project_defaults(options, require_current_folder(), os.environ)
            options[DryRun].check_contradictions(options)
            target = resolve_target(options, parse_notes.lookalike_note)
            check_token(options[Nodes].token)
            instead = load_features().run_instead(options)
            if instead:
                instead.check()
                if not options[DryRun].dry_run:
                    return _run_by_feature(instead, target, options, parse_notes, file_notes)
            inputs, show_rules = _make_plan(options, target, instead, parse_notes, file_notes)
            if options[DryRun].dry_run:
                print_plan(inputs.plan, inputs.options, parse_notes.alternative_command, is_remote=instead is not None)
                return 0
            plan = inputs.plan
            from ddplaunch.cli.node_start import NodeStart

            start = NodeStart(inputs.options, plan)
            undo.callback(start.tree.close)
            from ddplaunch.cli.job_launch import build_node_job
            from ddplaunch.core.net.link import listen_on_node_zero

            job_config = build_job_config(inputs.options, plan.master_addr, plan.master_port, inputs.cluster_env)
            check_node_options(plan, job_config, print_notes)
            if plan.nnodes > 1:
                listener_socket = listen_on_node_zero(plan, job_config)
            job = build_node_job(inputs, show_rules, start, job_config, listener_socket)
            undo.pop_all()
        except UsageError as error:
            from ddplaunch.cli import declining

            # Before notifying the other nodes, which may take a while.
            hints = [*filter(None, (error.hint or "").splitlines()), *file_notes]
            print_error(error.message, "\n".join(hints) or None, error.exit_code)
            declining.notify_other_nodes(error, options, listener_socket)
            return error.exit_code
    code = job.run()
    print_left_out_plugins()  # a plug-in that has raised
    return code


def _run_by_feature(
    instead: ReplacementLauncher, target: Target, options: Options, parse_notes: ParseNotes, file_notes: tuple[str, ...]
) -> int:
    """Let a feature run the job (as over SSH) instead of a launcher on this machine; return the exit code."""
    FORMATTER.run_id = new_run_id(options, target)
    print_notes(*parse_notes.torchrun_notes, *file_notes, *_lookalikes(parse_notes))
    return instead.run(target, FORMATTER.run_id)


def _lookalikes(parse_notes: ParseNotes) -> list[str]:
    return [f"note: {parse_notes.lookalike_note}"] if parse_notes.lookalike_note else []


def _make_plan(
    options: Options,
    target: Target,
    instead: ReplacementLauncher | None,
    parse_notes: ParseNotes,
    file_notes: tuple[str, ...],
) -> tuple[PreparedPlan, ShowRules]:
    """Return the plan and the rules for shown output; ``instead``: the feature that would run the job, in a dry run."""
    notes = [*parse_notes.torchrun_notes, *file_notes]
    if instead:
        options, note = instead.options_for_dry_run()
        notes.insert(0, note)
    planning = prepare_plan(options, target, notes, remote=instead is not None)
    if instead:
        planning = replace(planning, plan=instead.complete_plan(planning.plan, planning.options))
    plan = planning.plan
    FORMATTER.set_origin(plan, numbered=plan.has_node_rank)
    show_rules = read_show_rules(planning.options, plan)
    if plan.node_rank == 0 or not has_shared_log(planning.cluster_env):
        spawn = spawn_call_note(target, len(plan.local_ranks))
        print_notes(*_lookalikes(parse_notes), *([spawn] if spawn else []))
    return planning, show_rules
