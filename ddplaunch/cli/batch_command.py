"""Commands that write a job for a scheduler: ``submit`` and ``manifest``.

Their own options are for the scheduler; the options of ``run`` are for the job and travel with it. A value comes from
the command line, else from a file (``defaults``), else the scheduler chooses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from ddplaunch.cli.command_line import (
    DRY_RUN,
    FOREIGN_OPTION_NAMES,
    HELP,
    JSON,
    TRAILING_OPTIONS,
    ArgvGrammar,
    SplitArgv,
    TranslatedArgv,
    option_name,
    option_values,
    split_argv,
)
from ddplaunch.cli.defaults import COMMAND_LINE_ONLY, Defaults, read_defaults
from ddplaunch.cli.options import SECTIONS, OptionSource
from ddplaunch.cli.run_command import PARAMS, PathType, value_source
from ddplaunch.cli.target_command import TargetCommand, spellings
from ddplaunch.cli.typed import (
    ParseNotes,
    check_target,
    current_directory,
    make_option_lookup,
    parse_notes_for,
    translate_torchrun,
)
from ddplaunch.cli.values import UNITS, parse_seconds
from ddplaunch.errors import UsageError, sanitize_line

REFUSED_RUN_OPTIONS = {
    **dict.fromkeys(("--nnodes", "--standalone"), "--nodes N says how many"),
    "--node-rank": "leave it out: the scheduler numbers the nodes",
    **dict.fromkeys(
        ("--master-addr", "--rdzv-backend", "--rdzv-endpoint", "--local-addr"),
        "leave it out: node 0 is the first of the nodes that the scheduler gives",
    ),
    **dict.fromkeys(
        ("--join-window", "--max-membership-changes", "--grow"),
        "leave it out: the job has the nodes that the scheduler gives it",
    ),
    **dict.fromkeys(
        ("--hosts", "--hostfile", "--include", "--exclude", "--env", "--remote-python"),
        "leave it out: the scheduler starts the nodes, not SSH",
    ),
    "--cluster": "leave it out: the scheduler is known",
    "--stdin": "leave it out: a batch job has no terminal",
    "--ui": "leave it out: a batch job has no terminal",
}
"""Options of ``run`` and of torchrun that such a job cannot have, and what to type instead."""

SBATCH_ALIASES = {
    "-a": "--array", "-C": "--constraint", "--num-nodes": "--nodes", "-o": "--output", "-q": "--qos",
    "-d": "--dependency", "-e": "--error",
    "-w": "--nodelist", "-x": "--exclude", "-n": "--nproc", "--ntasks": "--nproc", "--ntasks-per-node": "--nproc",
}  # fmt: skip
"""What sbatch and other programs call an option of ours."""


TRAILING_BATCH_OPTIONS = TRAILING_OPTIONS - {DRY_RUN, JSON} | {"--nodes", "--gpus-per-node"}
"""The options that are ours right behind the target too."""


class ParsedBatchLine(NamedTuple):
    """What the command has read, and click's context keeps."""

    line: SplitArgv
    defaults: Defaults  # for what the line does not say


_META_KEY = "ddplaunch.line"


class BatchCommand(TargetCommand):
    """Takes the options of ``run`` as ``run`` does, before, between and behind its own.

    It never guesses that a word is the program's if it could be ours: what goes to a scheduler is paid for.
    """

    own_options: Mapping[str, Sequence[click.Option]]  # the options for the scheduler, under their headings in the help
    foreign_options: Mapping[str, str] = {}  # options of other commands, and which have them
    refused_options: Mapping[str, str]  # options of run and torchrun that make no sense here, and what to do instead

    def spellings(self, ctx: click.Context) -> dict[str, bool]:
        """Every spelling of every option of ours and of ``run``, and whether it takes a value."""
        return {**spellings(PARAMS), **spellings(self.get_params(ctx))}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Have click read our words alone, which it would look for in front of the first other word only."""
        if ctx.resilient_parsing:  # shell completion looks at half a line
            return super().parse_args(ctx, args)
        known = self.spellings(ctx)
        # Variables count where the job runs.
        translation = translate_torchrun(args, known, {}, refused=self.refused_options, skipped=SBATCH_ALIASES.keys())
        line = self.split_argv(ctx, translation)
        if HELP.isdisjoint(line.options):
            check_target(line, known, self.name or "")
        ctx.obj = parse_notes_for(line, translation)
        target = [] if line.target is None else [line.target]
        return super().parse_args(ctx, [*line.options, "--", *target, *line.program_args])

    def split_argv(self, ctx: click.Context, typed: TranslatedArgv) -> SplitArgv:
        """Split the words typed; a command may look at them before."""
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
        defaults = read_defaults(
            self.name or "", flatten_options(self.own_options), current_directory(), os.environ, named
        )
        _check_gpus(typed_values, defaults)
        ctx.meta[_META_KEY] = ParsedBatchLine(line, defaults)
        ctx.default_map = {name: default.value for name, default in defaults.values.items()}
        return line


def _check_gpus(typed: Mapping[str, str], defaults: Defaults) -> None:
    """Refuse a number of GPUs in ``--gpus``, as sbatch has it: here it is the index of one."""
    text = typed.get("--gpus", "")
    if not re.fullmatch(r"([a-zA-Z][\w.-]*:)?\d+", text):
        return
    asked = {name: default.value for name, default in defaults.values.items()}
    asked |= {name[2:].replace("-", "_"): value for name, value in typed.items()}
    count = str(asked.get("gpus_per_node") or asked.get("gpus_per_task") or "").rpartition(":")[2]
    if text.isdecimal() and (asked.get("gres") or (count.isdecimal() and int(text) < int(count))):
        return
    what = f"--gpus {text} does not ask for GPUs: it chooses those with these indices on each node"
    raise UsageError(what, f"--gpus-per-node {text} asks for {text.rpartition(':')[2]} on each node")


def parse_notes() -> ParseNotes:
    """Return the remarks on the command line that is being run."""
    return click.get_current_context().find_object(ParseNotes) or ParseNotes()


def with_command_name(command: click.Command, error: UsageError) -> UsageError:
    """The error of what we share with ``run``, with this command in its hint."""
    hint = error.hint and re.sub(r"(?m)^(.*?)ddplaunch run\b", rf"\1ddplaunch {command.name}", error.hint)
    return UsageError(error.message, hint)


def parsed_line(ctx: click.Context) -> ParsedBatchLine:
    found = ctx.meta[_META_KEY]
    assert isinstance(found, ParsedBatchLine)
    return found


def flatten_options(own: Mapping[str, Sequence[click.Option]]) -> list[click.Option]:
    return [option for options in own.values() for option in options]


def all_params(own: Mapping[str, Sequence[click.Option]], refused: Mapping[str, str]) -> list[click.Parameter]:
    """The parameters of a command: its own, then those of ``run`` that travel with the job."""
    options = flatten_options(own)
    taken = {*refused, *(option.opts[-1] for option in options)}
    return [*options, *(param for param in PARAMS if param.opts[-1] not in taken)]


def option_sections(own: Mapping[str, Sequence[click.Option]], refused: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """The headings of its help, likewise."""
    taken = {*refused, *(option.opts[-1] for option in flatten_options(own))}
    ours = {heading: [option.opts[-1] for option in options] for heading, options in own.items()}
    theirs = {heading: [name for name in names if name not in taken] for heading, names in SECTIONS.items()}
    return {heading: [*ours.get(heading, ()), *theirs.get(heading, ())] for heading in dict.fromkeys([*ours, *theirs])}


OptionReader = Callable[[click.Context, click.Parameter, Any], Any]


def pattern_reader(
    pattern: str,
    expected: str,
    convert: Callable[[str], object] = str,
    hint: str | None = None,
    *,
    unique_names: bool = False,
) -> OptionReader:
    """Read a value of this pattern, or several; errors say what was ``expected``.

    ``convert`` converts a single one. With ``unique_names`` no two may have the same name before a "=".
    """

    def read(ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...] | None) -> object:
        texts = (value,) if isinstance(value, str) else value or ()
        for text in texts:
            if not re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
                raise invalid_value(ctx, param, text, f"expected {expected}", hint)
        if unique_names:
            check_unique_names(ctx, param, texts)
        return convert(value) if isinstance(value, str) else value

    return read


def check_unique_names(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> None:
    """Refuse two values for one name."""
    names = [text.partition("=")[0] for text in texts]
    for name, text in zip(names, texts, strict=True):
        if names.count(name) > 1:
            raise invalid_value(ctx, param, text, f"{name} is there twice", "leave one out")


def invalid_value(
    ctx: click.Context, param: click.Parameter, text: str, what: str, hint: str | None = None
) -> UsageError:
    """The error of a value, with the file that it comes from."""
    file = default_file_of(ctx, param)
    return UsageError(f"{param.opts[-1]} {text}: {what}{f' ({file})' if file else ''}", hint)


def parse_time_s(time: str) -> int | None:
    """What a value of --time is in seconds; None for no limit, which 0 is too (sbatch(1))."""
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
    """Read a time in one of these forms, or with a unit as the times of ``run``; return it as sbatch takes it.

    A number alone is minutes for sbatch and seconds for ``run``, so it is refused.
    """
    form = pattern_reader(
        TIME_PATTERN, f"a time with a unit like 4h or 90m, or days-hours:minutes:seconds, like {example}"
    )

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
        if text is None:
            return None
        if re.fullmatch(r"0*[1-9]\d*", text):
            name, typed = param.opts[-1], sanitize_line(text, 20)
            hint = f"{name} {typed}m for minutes, {name} {typed}s for seconds"
            raise invalid_value(ctx, param, text, "minutes or seconds?", hint)
        length = parse_seconds(text) if text[-1:] in UNITS else None
        if length is None or length < 1:
            form(ctx, param, text)
            return text
        minutes, secs = divmod(round(length), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{secs:02}"

    return read


def option(
    names: str,
    metavar: str,
    help: str,
    callback: OptionReader | None = None,
    *,
    multiple: bool = False,
    path: bool = False,
) -> click.Option:
    """An option with a value; ``names`` are its own and, after a space, the one that Python has for it."""
    kind = PathType(dir_okay=False) if path else None
    help += "; may be repeated." if multiple else ""
    return click.Option(names.split(), metavar=metavar, help=help, callback=callback, multiple=multiple, type=kind)


CONFIG = option(
    "--config", "FILE", "Read defaults from this file instead of the nearest pyproject.toml, or from none.", path=True
)
_NODES = pattern_reader(r"[1-9]\d{0,5}", "a number of nodes, 1 or more", int)
NODES = click.Option(
    ["-N", "--nodes"], metavar="N", help="Number of nodes.", callback=_NODES, default="1", show_default=True
)
_CPUS = pattern_reader(r"[1-9]\d{0,8}", "a number of CPUs for all ranks of a node, like 64", int)
CPUS = option("-c --cpus-per-task", "N", "Number of CPUs on each node, for all its ranks.", _CPUS)
TIME_HELP = "Time limit: 4h, 90m, 4:00:00, or 1-12 for one day and 12 hours."
TIME = option("-t --time", "TIME", TIME_HELP, time_reader("4:00:00"))
MEMORY = pattern_reader(r"\d{1,15}[KMGT]?B?", "a size like 200G, or 0 for all memory of the node")
JOB_NAME = option("-J --job-name", "NAME", "Name of the job.  [default: from the target]")


def run_argv(ctx: click.Context) -> tuple[str, ...]:
    """The words for ``ddplaunch run`` on the nodes: as typed, without those for the scheduler."""
    line = parsed_line(ctx).line
    assert line.target is not None
    takes, own = spellings(ctx.command.params), spellings(flatten_options(_own_options(ctx)))
    words: list[str] = []
    typed = iter(line.options)
    for word in typed:
        name, equals, _ = word.partition("=")
        value = [next(typed)] if takes[name] and not equals else []
        if name not in own:
            words += [word, *value]
    if line.target.startswith("-"):
        return (*words, "--", line.target, *line.program_args)
    return (*words, line.target, *(("--", *line.program_args) if line.program_args else ()))


def print_sources(
    ctx: click.Context,
    values: Mapping[str, object],
    otherwise: Mapping[str, str],
    notes: Iterable[str] = (),
    overrides: Mapping[str, str] = {},
    more: Iterable[str] = (),
    *,
    dry_run: bool,
) -> None:
    """Print on stderr where values come from, and notes: in a dry run of all values, else of those from files.

    Args:
        values: by click's names of the options.
        otherwise: the source of a value that was not given, by the option's name without dashes.
        notes: those on the job; what people should know of the words typed and of files not read stands before them.
        overrides: the variables that sbatch reads, by the option's name.
        more: lines on other values.
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
    said = parse_notes()
    for note in (*said.torchrun_notes, *filter(None, [said.lookalike_note]), *parsed_line(ctx).defaults.notes, *notes):
        click.echo(f"{'note' if dry_run else 'ddplaunch'}: {note}", err=True)


def _own_options(ctx: click.Context) -> Mapping[str, Sequence[click.Option]]:
    assert isinstance(ctx.command, BatchCommand)
    return ctx.command.own_options


def default_file_of(ctx: click.Context, param: click.Parameter) -> str | None:
    """The file of defaults that a value comes from; None if it does not."""
    name = param.name or ""
    return parsed_line(ctx).defaults.values[name].file if value_source(ctx, name) is OptionSource.FILE else None
