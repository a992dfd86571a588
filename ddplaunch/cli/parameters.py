"""What click reads: made of the options as they are declared, and where it has their values from."""

from __future__ import annotations

from typing import Any

import click

from ddplaunch.cli.option import Option
from ddplaunch.cli.options import OPTIONS, Source

_BY_CLICK = {"COMMANDLINE": Source.TYPED, "ENVIRONMENT": Source.VARIABLE, "DEFAULT_MAP": Source.FILE}


class PathType(click.Path):
    """Words that may be anything here, and are completed as the names of files or folders."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


def _made(option: Option) -> click.Parameter:
    kind: click.ParamType[Any] | None = None
    if option.choices:
        kind = click.Choice(option.choices)
    elif option.completes:
        kind = PathType(file_okay=option.completes != "folder", dir_okay=option.completes != "file")
    if option.is_argument:
        return click.Argument([option.name], nargs=-1 if option.rest else 1, type=kind)
    how: dict[str, Any] = {"help": option.help, "envvar": option.envvar}
    if option.off:
        return click.Option([f"{option.opts[-1]}/{option.off}"], is_flag=True, default=None, **how)
    if option.is_flag:
        return click.Option(option.spellings, is_flag=True, **how)
    if (read := option.read) is not None:
        how["callback"] = lambda ctx, param, text: read(option, text)
    if option.default is not None:
        how |= {"default": option.default, "show_default": True}
    return click.Option(option.spellings, metavar=option.metavar, type=kind, multiple=option.multiple, **how)


PARAMS = [_made(option) for option in OPTIONS]


def source_of(context: click.Context, name: str) -> Source:
    """Where click has the value of an option from."""
    source = context.get_parameter_source(name)
    return _BY_CLICK.get(source.name, Source.DEFAULT) if source else Source.DEFAULT
