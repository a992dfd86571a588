"""Commands that start a target: which words of the line are ours, the help by headings, the target found and checked.

All of them read a command line in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import click

from ddplaunch.cli.command_line import FEW, HELP, HELP_ALL, CommandLine, Grammar, Translation, split
from ddplaunch.cli.typed import Remarks, check_target, program_names, remarks_on, translated

SETTINGS = {"help_option_names": ["-h", "--help"], "allow_interspersed_args": False, "max_content_width": 110}
"""The context settings of such a command."""


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

    def split(self, ctx: click.Context, typed: Translation) -> CommandLine:
        """Split the words typed; a subclass may know more options, or read them in another way."""
        return split(typed, Grammar(self.spellings(ctx), self.few), program_names())

    def spellings(self, ctx: click.Context) -> dict[str, bool]:
        """Every spelling of every option of ours, and whether it takes a value."""
        return spellings(self.get_params(ctx))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion looks at half a line
            return super().parse_args(ctx, args)
        environ = os.environ if self.starts_here else {}
        known = self.spellings(ctx)
        translation = translated(args, known, environ, refused=self.refused, skipped=self.skipped)
        line = self.split(ctx, translation)
        if HELP.isdisjoint(line.ours):
            check_target(line, known, self.name or "")
        ctx.obj = remarks_on(line, translation)
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
