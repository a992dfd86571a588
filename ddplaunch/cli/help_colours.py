"""Colours of ``--help`` in a terminal that has colours; click removes them from output to files and pipes."""

from __future__ import annotations

from collections.abc import Iterable

import click

from ddplaunch.cli.console_output import is_colour_allowed


class _Formatter(click.HelpFormatter):
    """Writes headings in green, and the names of options and commands in cyan."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, _style("Usage:", "green", bold=True) + " " if prefix is None else prefix)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{_style(f'{heading}:', 'green', bold=True)}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(_style(first, "cyan"), second) for first, second in rows], col_max, col_spacing)


def _style(text: str, colour: str, *, bold: bool = False) -> str:
    return click.style(text, fg=colour, bold=bold or None) if is_colour_allowed() else text


class HelpContext(click.Context):
    """The context of all commands."""

    formatter_class = _Formatter
