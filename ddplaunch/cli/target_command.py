"""Commands that start a target: which words of the line are ours, the help by headings, the target found and checked.

All of them read a command line in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ddplaunch.cli.command_line import FEW, HELP, HELP_ALL, CommandLine, Translation, goes_on, name_of, passed_on, split
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.target.target import Target

SETTINGS = {"help_option_names": ["-h", "--help"], "allow_interspersed_args": False, "max_content_width": 110}
"""The context settings of such a command."""

TORCHRUN_SIGNS = ("PET_", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
"""How the variables begin that stand for torchrun's options."""


class Remarks(NamedTuple):
    """What reading the command line has shown beside the values; kept as the context's object."""

    torchrun: tuple[str, ...] = ()  # what people should know of torchrun's options
    alike: str | None = None  # a note on options that went to the program and are spelled like ours
    passed_on: str | None = None  # the command that gives the target the --dry-run behind it
    from_variables: frozenset[str] = frozenset()  # the options that torchrun's variables have set


def remarks() -> Remarks:
    """Return the remarks on the command line that is being run."""
    return click.get_current_context().find_object(Remarks) or Remarks()


class TargetCommand(click.Command):
    """Knows which words are its own: click alone would take all options before the first other word."""

    sections: Mapping[str, Sequence[str]]  # the headings of --help-all, and the options under each
    common: Sequence[str]  # the options that most people need, which --help shows
    examples: Sequence[tuple[str, str]]  # what each command line of --help is for, and the line
    starts_here = True  # in our own surroundings, so that variables count
    refused: Mapping[str, str] = {}  # options of torchrun that make no sense here, and what to do instead
    skipped: Collection[str] = ()  # those that mean something else here
    few: Collection[str] = FEW  # what is ours right behind the target too

    def split(self, ctx: click.Context, words: list[str], **how: Any) -> CommandLine:
        """Split the words typed; a subclass may know more options, or read them in another way."""
        return split(words, self.spellings(ctx), program_names(), few=self.few, **how)

    def spellings(self, ctx: click.Context) -> dict[str, bool]:
        """Every spelling of every option of ours, and whether it takes a value."""
        return spellings(self.get_params(ctx))

    def translated(self, ctx: click.Context, words: list[str]) -> Translation:
        """The words typed, with torchrun's options as ours; if there are none, nothing of it is imported."""
        known, environ = self.spellings(ctx), os.environ if self.starts_here else {}
        if not (goes_on(words, known) or any(name.startswith(TORCHRUN_SIGNS) for name in environ)):
            return Translation(words)
        from ddplaunch.cli.torchrun.dialect import translate

        return translate(words, known, environ, refused=self.refused, skipped=self.skipped)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion looks at half a line
            return super().parse_args(ctx, args)
        words, notes, of_torchrun, unsaid = self.translated(ctx, args)
        line = self.split(ctx, words, ends_at_target=of_torchrun, unsaid=unsaid)
        if line.target is None and not HELP & set(line.ours):
            takes = self.spellings(ctx)
            values = [pair for pair in zip(line.ours, line.ours[1:], strict=False) if takes.get(pair[0])]
            taken = f"; {values[-1][1]} was taken for the value of {values[-1][0]}" if values else ""
            hint = f"name a script or a function: ddplaunch {self.name} train.py"
            raise UsageError(f"the target is missing{taken}", hint)
        alike = None
        if line.alike:
            *first, last = line.alike
            named = f"{', '.join(first)} and {last} go" if first else f"{last} goes"
            alike = f"{named} to {line.target}; options of ddplaunch come before it"
        ctx.obj = Remarks(notes, alike, passed_on(line), unsaid - set(map(name_of, line.behind)))
        target = [] if line.target is None else [line.target]
        return super().parse_args(ctx, [*line.ours, "--", *target, *line.program])

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the options that most people need."""
        with formatter.section("Examples"):
            for what, line in self.examples:
                formatter.write(f"  # {what}\n  {line}\n")
        self.format_sections(ctx, formatter, {"Options": self.common})

    def format_sections(
        self, ctx: click.Context, formatter: click.HelpFormatter, sections: Mapping[str, Sequence[str]]
    ) -> None:
        records = {max(param.opts, key=len): param.get_help_record(ctx) for param in self.get_params(ctx)}
        for heading, names in sections.items():
            if lines := [record for name in names if (record := records[name])]:
                with formatter.section(heading):
                    formatter.write_dl(lines)


def _print_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print what ``--help-all`` shows, and end."""
    command = ctx.command
    if not value or ctx.resilient_parsing or not isinstance(command, TargetCommand):
        return
    formatter = ctx.make_formatter()
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    command.format_sections(ctx, formatter, command.sections)
    click.echo(formatter.getvalue().rstrip())
    ctx.exit()


_HELP_ALL = click.Option(
    [HELP_ALL], is_flag=True, is_eager=True, expose_value=False, callback=_print_all, help="Show all options and exit."
)


def spellings(params: Sequence[click.Parameter]) -> dict[str, bool]:
    """Every spelling of every option among ``params``, and whether it takes a value."""
    return {
        name: isinstance(param, click.Option) and not param.is_flag
        for param in params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("-")
    }


def program_names() -> Callable[[CommandLine, str], bool]:
    """Whether the target's own file names an option; the file is read when the first one is asked for."""

    @cache
    def found(target: str, as_module: bool, as_program: bool) -> Target | None:
        from ddplaunch.target.target import find

        try:
            return find(target, (), as_module=as_module, as_program=as_program, cwd=current_directory())
        except UsageError:  # said later, in its place
            return None

    def names(line: CommandLine, option: str) -> bool:
        target = found(line.target or "", not {"-m", "--module"}.isdisjoint(line.ours), "--no-python" in line.ours)
        return target is not None and target.names_option(option)

    return names


def current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist any more", "cd to one that exists") from None


def find_target(
    typed: str,
    args: tuple[str, ...],
    *,
    module: bool,
    no_python: bool,
    pass_local_rank: bool,
    start: str,
    preload: str | None,
) -> Target:
    """Find the target and check it against its arguments and the options, without running any of it.

    Raises:
        UsageError: it is not there, cannot be run, lacks an argument, or an option contradicts what it is.
    """
    from ddplaunch.target.target import Kind, find

    target = find(typed, args, as_module=module, as_program=no_python, cwd=current_directory())
    if target.signature is not None:
        from ddplaunch.target.arguments import check

        try:
            check(target.signature, target.args)
        except UsageError as error:
            raise UsageError(error.message, "\n".join(filter(None, (error.hint, remarks().alike)))) from None
    if pass_local_rank and target.signature is not None and not target.signature.reads_argv:
        what = f"--pass-local-rank does not work with {typed}, which is called with its parameters"
        raise UsageError(what, "a parameter named local_rank gets it")
    for name in preload.split(",") if preload else ():
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {preload}: {name!r} is not the name of a module", "--preload torch,numpy")
    if start == "exec" and preload:
        raise UsageError("--preload does not work with --start exec", "leave one of them out")
    if target.kind is Kind.PROGRAM and (start == "zygote" or preload):
        option = "--preload" if preload else "--start zygote"
        raise UsageError(f"{option} does not work with --no-python: only Python can be forked", f"leave {option} out")
    return target
