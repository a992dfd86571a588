"""Base of ``submit`` and ``manifest``, the commands that write a job for a scheduler.

Their own options are for the scheduler; options of ``run`` are passed to ``ddplaunch run`` in the job. Values come from
the command line, then from a file (``defaults``), else the scheduler decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.options import Options, OptionSource, PathType, value_source
from ddplaunch.cli.argv_splitter import (
    DRY_RUN,
    FOREIGN_OPTION_NAMES,
    HELP,
    JSON,
    TRAILING_OPTIONS,
    ArgvGrammar,
    ArgvParts,
    TranslatedArgv,
    option_name,
    option_values,
    split_argv,
)
from ddplaunch.cli.config_defaults import COMMAND_LINE_ONLY, Defaults, read_defaults
from ddplaunch.cli.run_options import GROUPS, PARAMS, SECTIONS
from ddplaunch.cli.target_args import (
    ParseNotes,
    check_not_pasted,
    check_target,
    make_option_lookup,
    make_parse_notes,
    require_current_folder,
    resolve_target,
    translate_torchrun,
)
from ddplaunch.cli.target_command import TargetCommand, spellings
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.option_values import UNITS, parse_seconds
from ddplaunch.core.options import wants_free_gpus
from ddplaunch.features.programs.placement import NodeGroup, group_nodes, place_programs
from ddplaunch.features.programs.spec import decode_programs
from ddplaunch.system.target.target import Target

REFUSED_RUN_OPTIONS = {
    **dict.fromkeys(("--nnodes", "--standalone"), "use --nodes N"),
    "--node-rank": "leave it out: the scheduler numbers the nodes",
    **dict.fromkeys(
        ("--master-addr", "--rdzv-backend", "--rdzv-endpoint", "--local-addr"),
        "leave it out: node 0 is the first node of the allocation",
    ),
    **dict.fromkeys(
        ("--join-window", "--max-membership-changes", "--grow"),
        "leave it out: the job runs on all nodes of its allocation",
    ),
    **dict.fromkeys(
        ("--hosts", "--hostfile", "--include", "--exclude", "--env", "--remote-python"),
        "leave it out: the scheduler starts the nodes, not SSH",
    ),
    "--cluster": "leave it out: the scheduler is known",
    "--name": "--job-name names the job, and its number the runs",
    "--stdin": "leave it out: a batch job has no terminal",
    "--ui": "leave it out: a batch job has no terminal",
}
"""Options of ``run`` and of torchrun that a batch job cannot have, and what to do instead."""

SBATCH_ALIASES = {
    "-a": "--array", "-C": "--constraint", "--num-nodes": "--nodes", "-o": "--output", "-q": "--qos",
    "-d": "--dependency", "-e": "--error", "-G": "--gpus-per-node",
    "-w": "--nodelist", "-x": "--exclude", "-n": "--nproc", "--ntasks": "--nproc", "--ntasks-per-node": "--nproc",
}  # fmt: skip
"""Options of sbatch and other programs, and ddplaunch's option for each."""


TRAILING_BATCH_OPTIONS = TRAILING_OPTIONS - {DRY_RUN, JSON} | {"--nodes", "--gpus-per-node"}
"""Options that belong to ddplaunch even directly after the target."""


class ParsedBatchLine(NamedTuple):
    """The parsed command line, stored in click's context."""

    line: ArgvParts
    defaults: Defaults  # for options not in the line


_META_KEY = "ddplaunch.line"


class BatchCommand(TargetCommand):
    """A command that accepts the options of ``run`` among its own.

    A word after the target that could be an option is always an error, never passed to the program with a note: the
    job's node hours are paid for.
    """

    own_options: Mapping[str, Sequence[click.Option]]  # the options for the scheduler, by heading in the help
    foreign_options: Mapping[str, str] = {}  # options of other commands, and these commands
    refused_options: Mapping[str, str]  # options of run and torchrun, and what to do instead
    defaults_table: str | None = None  # the table of its defaults in files, if it does not have the command's name

    def spellings(self, ctx: click.Context) -> dict[str, bool]:
        """Return every spelling of every own option and of those of ``run``, and whether it takes a value."""
        return {**spellings(PARAMS), **spellings(self.get_params(ctx))}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the line, then let click parse the options; click alone would stop at the first argument."""
        if ctx.resilient_parsing:  # shell completion of an unfinished line
            return super().parse_args(ctx, args)
        known = self.spellings(ctx)
        args = load_features().rewrite_words(args, known)
        # Without the environment: torchrun's variables are read where the job runs.
        try:
            check_not_pasted(args, known, options=False)
        except UsageError as error:
            raise with_command_name(self, error) from None
        translation = translate_torchrun(args, known, {}, refused=self.refused_options, skipped=SBATCH_ALIASES.keys())
        line = self.split_argv(ctx, translation)
        if HELP.isdisjoint(line.options):
            check_target(line, known, self.name or "")
        ctx.obj = make_parse_notes(line, translation)
        target = [] if line.target is None else [line.target]
        return super().parse_args(ctx, [*line.options, "--", *target, *line.program_args])

    def split_argv(self, ctx: click.Context, typed: TranslatedArgv) -> ArgvParts:
        """Split the command line and read the defaults; a command may override it to check the words first."""
        known = self.spellings(ctx)
        of_sbatch = {of: name for of, name in SBATCH_ALIASES.items() if name in known}
        elsewhere = {**FOREIGN_OPTION_NAMES, **self.foreign_options, **of_sbatch}
        try:
            grammar = ArgvGrammar(known, TRAILING_BATCH_OPTIONS, known.keys() - HELP, self.refused_options, elsewhere)
            line = split_argv(typed, grammar, make_option_lookup())
        except UsageError as error:
            raise with_command_name(self, error) from None
        for name in map(option_name, line.options):
            if name in self.refused_options:
                raise UsageError(f"{name} does not work with ddplaunch {self.name}", self.refused_options[name])
        typed_values = option_values(line.options, known)
        named = typed_values.get("--config")
        table, own = self.defaults_table or self.name or "", flatten_options(self.own_options)
        defaults = read_defaults(table, own, require_current_folder(), os.environ, named)
        _check_gpus(typed_values, defaults)
        ctx.meta[_META_KEY] = ParsedBatchLine(line, defaults)
        ctx.default_map = {name: default.value for name, default in defaults.values.items()}
        return line


def _check_gpus(typed: Mapping[str, str], defaults: Defaults) -> None:
    """Check that ``--gpus`` is not used like sbatch's, for a number of GPUs: here it is a list of indices."""
    text = typed.get("--gpus", "")
    if wants_free_gpus(text) or not re.fullmatch(r"([a-zA-Z][\w.-]*:)?\d+", text):
        return
    values = {name: default.value for name, default in defaults.values.items()}
    values |= {name[2:].replace("-", "_"): value for name, value in typed.items()}
    count = str(values.get("gpus_per_node") or values.get("gpus_per_task") or "").rpartition(":")[2]
    if text.isdecimal() and (values.get("gres") or (count.isdecimal() and int(text) < int(count))):
        return
    what = f"--gpus {text} does not request GPUs: it selects GPUs of each node by index"
    raise UsageError(what, f"--gpus-per-node {text} requests {text.rpartition(':')[2]} on each node")


def command_line_notes() -> ParseNotes:
    """Return the notes on the current command line."""
    return click.get_current_context().find_object(ParseNotes) or ParseNotes()


def with_command_name(command: click.Command, error: UsageError) -> UsageError:
    """Return an error of code shared with ``run``, with a hint that names this command instead of ``run``."""
    hint = error.hint and re.sub(r"(?m)^(.*?)ddplaunch run\b", rf"\1ddplaunch {command.name}", error.hint)
    return UsageError(error.message, hint)


def find_local_target(ctx: click.Context) -> Target:
    """Return the target as it is on this machine. Raises UsageError for one that ``run`` would reject here."""
    try:
        return resolve_target(Options.from_click(GROUPS, ctx), command_line_notes().lookalike_note)
    except UsageError as error:
        raise with_command_name(ctx.command, error) from None


def parsed_line(ctx: click.Context) -> ParsedBatchLine:
    found = ctx.meta[_META_KEY]
    assert isinstance(found, ParsedBatchLine)
    return found


def flatten_options(own: Mapping[str, Sequence[click.Option]]) -> list[click.Option]:
    return [option for options in own.values() for option in options]


def all_params(own: Mapping[str, Sequence[click.Option]], refused: Mapping[str, str]) -> list[click.Parameter]:
    """Return the parameters of a command: its own, then those of ``run`` that it passes on."""
    options = flatten_options(own)
    taken = {*refused, *(option.opts[-1] for option in options)}
    return [*options, *(param for param in PARAMS if param.opts[-1] not in taken)]


def option_sections(own: Mapping[str, Sequence[click.Option]], refused: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return the options of a command by heading in its help: its own, then those of ``run`` that it passes on."""
    taken = {*refused, *(option.opts[-1] for option in flatten_options(own))}
    sections = {heading: [option.opts[-1] for option in options] for heading, options in own.items()}
    for heading, names in SECTIONS.items():
        sections.setdefault(heading, []).extend(name for name in names if name not in taken)
    return dict(sections)


OptionReader = Callable[[click.Context, click.Parameter, Any], Any]


def pattern_reader(
    pattern: str,
    expected: str,
    convert: Callable[[str], object] = str,
    hint: str | None = None,
    *,
    unique_names: bool = False,
) -> OptionReader:
    """Return a parser of values that match a pattern; errors say that ``expected`` was expected.

    ``convert`` converts the value of an option that cannot be repeated. With ``unique_names``, names before "=" must
    differ.
    """

    def parse_value(ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...] | None) -> object:
        texts = (value,) if isinstance(value, str) else value or ()
        for text in texts:
            if not re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
                raise invalid_value_error(ctx, param, text, f"expected {expected}", hint)
        if unique_names:
            check_unique_names(ctx, param, texts)
        return convert(value) if isinstance(value, str) else value

    return parse_value


def check_unique_names(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> None:
    """Check that no name has two values."""
    names = [text.partition("=")[0] for text in texts]
    for name, text in zip(names, texts, strict=True):
        if names.count(name) > 1:
            raise invalid_value_error(ctx, param, text, f"duplicate {name}", "leave one out")


def invalid_value_error(
    ctx: click.Context, param: click.Parameter, text: str, what: str, hint: str | None = None
) -> UsageError:
    """Build the error of an invalid value, with the file that it comes from."""
    file = default_file_of(ctx, param)
    return UsageError(f"{param.opts[-1]} {text}: {what}{f' ({file})' if file else ''}", hint)


def parse_time_s(time: str) -> int | None:
    """Convert a value of --time to seconds; None for no limit, also for 0 (sbatch(1))."""
    if not time[0].isdigit():
        return None
    days, dash, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if dash or len(numbers) == 3:  # [days-]hours[:minutes[:seconds]]
        hours, minutes, secs = [*numbers, 0, 0][:3]
    else:  # minutes[:seconds]
        hours, minutes, secs = [0, *numbers, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs or None


TIME_PATTERN = r"\d{1,9}(:\d\d?){0,2}|\d{1,9}-\d\d?(:\d\d?){0,2}|UNLIMITED|INFINITE"
"""The forms of sbatch's --time: 90, 90:00, 4:00:00, 1-12, 1-12:30, 1-12:30:00."""


def time_reader(example: str) -> OptionReader:
    """Return a parser of times, in sbatch's forms or with a unit as for ``run``; its result is in sbatch's form.

    A plain number is an error: it would be minutes for sbatch and seconds for ``run``.
    """
    form = pattern_reader(
        TIME_PATTERN, f"a time with a unit like 4h or 90m, or days-hours:minutes:seconds, like {example}"
    )

    def parse_time(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
        if text is None:
            return None
        if re.fullmatch(r"0*[1-9]\d*", text):
            name, typed = param.opts[-1], sanitize_line(text, 20)
            hint = f"{name} {typed}m for minutes, {name} {typed}s for seconds"
            raise invalid_value_error(ctx, param, text, "no unit", hint)
        length = parse_seconds(text) if text[-1:] in UNITS else None
        if length is None or length < 1:
            form(ctx, param, text)
            return text
        minutes, secs = divmod(round(length), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{secs:02}"

    return parse_time


def option(
    names: str,
    metavar: str,
    help: str,
    callback: OptionReader | None = None,
    *,
    multiple: bool = False,
    path: bool = False,
) -> click.Option:
    """Create an option with a value; ``names``: its spellings and, after a space, its Python name."""
    kind = PathType(dir_okay=False) if path else None
    help += "; may be repeated." if multiple else ""
    return click.Option(names.split(), metavar=metavar, help=help, callback=callback, multiple=multiple, type=kind)


CONFIG = option(
    "--config", "FILE", "Read defaults from this file instead of the nearest pyproject.toml, or none.", path=True
)
_NODES = pattern_reader(r"[1-9]\d{0,5}", "a number of nodes, 1 or more", int)
NODES = click.Option(
    ["-N", "--nodes"], metavar="N", help="Number of nodes.", callback=_NODES, default="1", show_default=True
)
_CPUS = pattern_reader(r"[1-9]\d{0,8}", "a number of CPUs for all ranks of a node, like 64", int)
CPUS = option("-c --cpus-per-task", "N", "Number of CPUs on each node, for all its ranks.", _CPUS)
TIME_HELP = "Time limit: 4h, 90m, 4:00:00, or 1-12 (days-hours)."
TIME = option("-t --time", "TIME", TIME_HELP, time_reader("4:00:00"))
MEMORY = pattern_reader(r"\d{1,15}[KMGT]?B?", "a size like 200G, or 0 for all memory of the node")
JOB_NAME = option("-J --job-name", "NAME", "Name of the job.  [default: from the target]")


def check_program_nodes(ctx: click.Context, target: str, nodes: int) -> None:
    """Raise UsageError if the job's programs need another number of nodes than ``nodes``."""
    if programs := decode_programs(ctx.params.get("program") or (), target):
        place_programs(programs, nodes)


def group_program_nodes(ctx: click.Context, target: str, nodes: int, gpus_per_node: int) -> list[NodeGroup]:
    """Return the node groups: nodes with ranks, then the own nodes of each program; none for a job of ranks alone.

    Raises UsageError if the programs need another number of nodes.
    """
    programs = decode_programs(ctx.params.get("program") or (), target)
    return group_nodes(programs, nodes, gpus_per_node) if programs else []


def run_argv(ctx: click.Context) -> tuple[str, ...]:
    """Return the arguments of ``ddplaunch run`` on the nodes: the command line without the scheduler's options."""
    line = parsed_line(ctx).line
    assert line.target is not None
    own = spellings(flatten_options(_own_options(ctx)))
    words = select_typed_options(ctx, lambda name: name not in own)
    if line.target.startswith("-"):
        return (*words, "--", line.target, *line.program_args)
    return (*words, line.target, *(("--", *line.program_args) if line.program_args else ()))


def select_typed_options(ctx: click.Context, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return those typed options, with their values, whose names ``is_wanted`` accepts."""
    takes, words = spellings(ctx.command.params), list[str]()
    rest = iter(parsed_line(ctx).line.options)
    for word in rest:
        name, equals, _ = word.partition("=")
        value = [next(rest)] if takes[name] and not equals else []
        if is_wanted(name):
            words += [word, *value]
    return words


def print_value_sources(
    ctx: click.Context,
    values: Mapping[str, object],
    otherwise: Mapping[str, str],
    notes: Iterable[str] = (),
    overrides: Mapping[str, str] = {},
    more: Iterable[str] = (),
    *,
    dry_run: bool,
) -> None:
    """Print to stderr where values come from (all in a dry run, else those from files), then notes.

    Args:
        values: by the Python names of the options.
        otherwise: the source of a value that was not given, by the option's name without dashes.
        notes: on the job; printed after those on the command line and on files that were not read.
        overrides: the environment variables that sbatch reads, by the option's name.
        more: more lines for a dry run.
    """
    lines = []
    for option in flatten_options(_own_options(ctx)):
        name = option.name or ""
        if name not in values or option.opts[-1] in COMMAND_LINE_ONLY:
            continue
        key, value, source = option.opts[-1].removeprefix("--"), values[name], default_file_of(ctx, option)
        if dry_run and not source:
            source = option.opts[-1] if value_source(ctx, name) is OptionSource.TYPED else otherwise.get(key)
            if not source and (variable := os.environ.get(overrides.get(key, ""))):
                value, source = variable, f"{overrides[key]}, which sbatch reads"
        if source:
            lines.append(f"{key}: {', '.join(map(str, value)) if isinstance(value, tuple) else value} ({source})")
    for line in (*lines, *(more if dry_run else ())):
        click.echo(line if dry_run else f"ddplaunch: {line}", err=True)
    parsed = command_line_notes()
    for note in (
        *parsed.torchrun_notes,
        *filter(None, [parsed.lookalike_note]),
        *parsed_line(ctx).defaults.notes,
        *notes,
    ):
        click.echo(f"{'note' if dry_run else 'ddplaunch'}: {note}", err=True)


def _own_options(ctx: click.Context) -> Mapping[str, Sequence[click.Option]]:
    assert isinstance(ctx.command, BatchCommand)
    return ctx.command.own_options


def default_file_of(ctx: click.Context, param: click.Parameter) -> str | None:
    """Return the configuration file that a value comes from, None if it comes from elsewhere."""
    name = param.name or ""
    return parsed_line(ctx).defaults.values[name].file if value_source(ctx, name) is OptionSource.FILE else None
