"""``ddplaunch run`` as a click command, for its help and shell completion only; ``reader`` parses its command line.

``PARAMS``, its options as click options, are also those of ``submit`` and ``manifest``.
"""

from __future__ import annotations

import ast
from typing import Any

import click
from click.shell_completion import CompletionItem

from ddplaunch.cli.option_declaration import Option
from ddplaunch.cli.run_options import COMMON_OPTIONS, OPTIONS, SECTIONS, OptionSource
from ddplaunch.cli.target_command import SETTINGS, TargetCommand

_SOURCE_BY_CLICK = {
    "COMMANDLINE": OptionSource.TYPED,
    "ENVIRONMENT": OptionSource.VARIABLE,
    "DEFAULT_MAP": OptionSource.FILE,
}


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


def _make_click_param(option: Option) -> click.Parameter:
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


PARAMS = [_make_click_param(option) for option in OPTIONS]


def value_source(context: click.Context, name: str) -> OptionSource:
    """Return where click found the value of an option."""
    source = context.get_parameter_source(name)
    return _SOURCE_BY_CLICK.get(source.name, OptionSource.DEFAULT) if source else OptionSource.DEFAULT


class _RunCommand(TargetCommand):
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


@click.command(cls=_RunCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=PARAMS)
def run(**_: object) -> None:
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
    from the arguments: --lr 0.1. Options of torchrun work too: `ddplaunch help torchrun`.
    """
