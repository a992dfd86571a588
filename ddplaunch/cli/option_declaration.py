"""The declaration of an option, and the option of click that is made from it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import closest_match, join_alternatives

Read = Callable[["Option", Any], Any]
"""Converts the text of a value, or the texts of a repeatable option; gets None where there is none."""


class Option:
    """An option, or an argument, which begins without a dash."""

    def __init__(
        self,
        spellings: Sequence[str],
        help: str = "",
        read: Read | None = None,
        *,
        metavar: str | None = None,
        choices: Sequence[str] = (),
        default: str | None = None,
        envvar: str | None = None,
        is_flag: bool = False,
        negative_spelling: str | None = None,
        multiple: bool = False,
        takes_rest: bool = False,
        completion: str | None = None,
    ) -> None:
        """Declare it.

        Args:
            spellings: the longest last; after it, without a dash, the Python name if that differs.
            metavar: the name of its value in the help. choices: the only valid values.
            negative_spelling: the spelling for "no" of a flag with three states: yes, no, unset.
            takes_rest: whether it is the argument that takes all remaining words.
            completion: how a shell completes its value: as "file", "folder" or "any" path.
        """
        self.opts = [each for each in spellings if each.startswith("-")] or list(spellings)
        self.name = spellings[-1].lstrip("-").replace("-", "_")
        self.spellings = spellings
        self.help, self.read, self.metavar, self.choices = help, read, metavar, choices
        self.default, self.envvar = default, envvar
        self.off = negative_spelling
        self.is_flag, self.multiple, self.rest, self.completes = is_flag, multiple, takes_rest, completion

    @property
    def is_argument(self) -> bool:
        return not self.opts[0].startswith("-")


class PathType(click.Path):
    """Accepts any text; a shell completes it as a path, or as a function in a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        path, colon, name = incomplete.rpartition(":")
        if param.name == "target" and colon and path.endswith(".py"):
            return [CompletionItem(f"{path}:{each}") for each in _functions(path) if each.startswith(name)]
        return super().shell_complete(ctx, param, incomplete)


def _functions(path: str) -> list[str]:
    """List the public functions of a Python file, without running it."""
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [each.name for each in body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]


class ChoiceType(click.Choice[str]):
    """One of several words; the error suggests the closest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices or param is None or ctx is None:
            return value
        name, near = param.opts[-1], closest_match(value, self.choices)
        what = f"{name} {sanitize_line(value, 60)}: expected {join_alternatives(self.choices)}"
        raise UsageError(what, f"did you mean {name} {near}?" if near else f"{ctx.command_path} --help shows more")


class FlagType(click.types.BoolParamType):
    """A flag, which an environment variable can set too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            if param is None or ctx is None:
                raise
            what = f"{param.envvar}={sanitize_line(value, 60)}: expected 1 or 0"
            raise UsageError(what, f"{ctx.command_path} --help shows more") from None


def make_click_param(option: Option) -> click.Parameter:
    """Return the option or argument of click."""
    kind: click.ParamType[Any] | None = None
    if option.choices:
        kind = ChoiceType(option.choices)
    elif option.completes:
        kind = PathType(file_okay=option.completes != "folder", dir_okay=option.completes != "file")
    if option.is_argument:
        return click.Argument([option.name], nargs=-1 if option.rest else 1, type=kind)
    how: dict[str, Any] = {"help": option.help, "envvar": option.envvar}
    if option.is_flag:
        how["type"] = FlagType()
    if option.off:
        return click.Option([f"{option.opts[-1]}/{option.off}"], is_flag=True, default=None, **how)
    if option.is_flag:
        return click.Option(option.spellings, is_flag=True, **how)
    if (read := option.read) is not None:
        how["callback"] = lambda ctx, param, text: read(option, text)
    if option.default is not None:
        how |= {"default": option.default, "show_default": True}
    return click.Option(option.spellings, metavar=option.metavar, type=kind, multiple=option.multiple, **how)
