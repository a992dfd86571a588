"""Help of the commands that take a TARGET: ``--help`` with common options and examples, ``--help-all`` with all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from ddplaunch.cli.argv_splitter import HELP_ALL

SETTINGS = {"help_option_names": ["-h", "--help"], "allow_interspersed_args": False, "max_content_width": 110}
"""The click context settings of these commands."""


class TargetCommand(click.Command):
    """A click command with ``--help`` and ``--help-all``."""

    sections: Mapping[str, Sequence[str]]  # the headings of --help-all, and the options under each
    common: Sequence[str]  # the options in --help
    examples: Sequence[tuple[str, str]]  # of --help: description and command line

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples and the common options."""
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


def _print_full_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the help with all options, and exit."""
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
    [HELP_ALL],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_full_help,
    help="Show all options and exit.",
)


def spellings(params: Sequence[click.Parameter]) -> dict[str, bool]:
    """Return every spelling of every option among ``params``, and whether it takes a value."""
    return {
        name: isinstance(param, click.Option) and not param.is_flag
        for param in params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("-")
    }
