"""What people type: the command and its subcommands, one file each; parsing and wiring only."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from ddplaunch import __version__
from ddplaunch.errors import EXIT_USAGE, LaunchError

_COMMANDS = {
    "run": "Start a training job on this machine, or this machine's share of one.",
    "devices": "Show the GPUs, processors and NUMA nodes of this machine.",
}
"""Each name is also that of its module, imported only when it is needed: start-up is part of the product."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f"ddplaunch.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and (args[0].endswith(".py") or ".py:" in args[0]):
            ctx.fail(f"No such command {args[0]!r}. Did you mean: ddplaunch run {args[0]}?")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddplaunch")
def cli() -> None:
    """Start PyTorch distributed training: ddplaunch run train.py --nproc 4"""


def main() -> None:
    """Run the command line; every way out of here is an exit code, and no traceback of ours reaches a user."""
    if sys.platform == "win32":
        print("ddplaunch does not support Windows; it runs in WSL 2.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    _open_standard_streams()
    try:
        code = cli.main(prog_name="ddplaunch", standalone_mode=False)
    except LaunchError as error:
        _complain(error.message, error.hint)
        code = error.exit_code
    except click.ClickException as error:
        _complain(error.format_message().rstrip("."), _help_hint(error))
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        code = 0
    _leave(code if isinstance(code, int) else 0)


def _complain(message: str, hint: str | None) -> None:
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {message}", err=True)
    if hint:
        click.echo("\n".join(f"  {line}" for line in hint.splitlines()[:2]), err=True)


def _help_hint(error: click.ClickException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"see {context.command_path} --help" if context is not None else None


def _open_standard_streams() -> None:
    """Keep descriptors 0 to 2 from becoming anything else of ours where we were started without them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


def _leave(code: int) -> None:
    """End without taking the interpreter apart: nothing of ours is left that would need it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # `| head` has read enough
            pass
    os._exit(code)
