"""What people type: the command and its subcommands, one file each; parsing and wiring only."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import sys
from importlib import import_module

import click

from ddplaunch import __version__
from ddplaunch.errors import EXIT_SIGNAL, EXIT_SOFTWARE, EXIT_USAGE, LaunchError, UsageError, shown
from ddplaunch.words import nearest

_COMMANDS = {
    "run": "Start a training job on this machine, or this machine's share of one.",
    "submit": "Submit a training job to Slurm.",
    "manifest": "Print a training job for Kubernetes as YAML.",
    "ps": "Show your jobs on this machine, and those that have ended.",
    "stacks": "Show who waits for whom in a running job, and where each rank is.",
    "top": "Show what a running job does, and where each rank stands.",
    "logs": "Print what the ranks of a run print, or printed last.",
    "stop": "Stop a running job.",
    "wait": "Wait for the end of a job, and return its exit code.",
    "report": "Tell how a run ended, and what each rank used.",
    "clean": "Remove what is kept of runs that have ended.",
    "devices": "Show the GPUs, processors and NUMA nodes of this machine.",
}
"""Each name is also that of its module, imported only when it is needed: start-up is part of the product."""

MAX_IN_MESSAGE = 500
MAX_IN_HINT = 4000  # it may be a command to copy
_LONG_WORD = r"(\S{100})\S{99,}?(:?)(?!\S)"  # which nobody reads to its end, and a colon behind it

COMPLETE = "_DDPLAUNCH_COMPLETE"  # the variable by which a shell asks click for completions (README)


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise UsageError(f"{error.option_name} must follow a command", _as_run(words)) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in _COMMANDS or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if ".py" in word or ":" in word or os.path.exists(word):
            hint = _as_run(args)
        else:
            near = nearest(word, _COMMANDS)
            hint = f"did you mean {near}?" if near else f"commands: {', '.join(_COMMANDS)}"
        raise UsageError(f"{word} is not a command of ddplaunch", hint)


def _as_run(words: list[str]) -> str:
    import shlex

    return f"to start a job: {shlex.join(['ddplaunch', 'run', *words])}"


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddplaunch", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Start PyTorch distributed training: ddplaunch run train.py --nproc 4"""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command line; every way out of here is an exit code, and no traceback of ours reaches a user."""
    if sys.platform == "win32":
        print("ddplaunch does not support Windows; it runs in WSL 2.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    gc.set_threshold(100_000)  # objects: to look for garbage among what is imported takes 5 % of a start
    _open_standard_streams()
    try:
        code = cli.main(prog_name="ddplaunch", complete_var=COMPLETE, standalone_mode=False)
    except LaunchError as error:
        complain(error.message, error.hint, code := error.exit_code)
    except click.NoSuchOption as error:
        known = [each for param in error.ctx.command.params for each in param.opts] if error.ctx else []
        near = nearest(error.option_name, known)
        complain(f"no such option: {error.option_name}", f"did you mean {near}?" if near else _help_hint(error))
        code = EXIT_USAGE
    except click.ClickException as error:
        complain(error.format_message().rstrip("."), _help_hint(error))
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_SIGNAL + 2
    except Exception as error:
        _confess(error)
        code = EXIT_SOFTWARE
    _leave(code if isinstance(code, int) else 0)


def complain(message: str, hint: str | None, code: int = EXIT_USAGE) -> None:
    """Print what is wrong: a line, and at most two of what to do; what was typed may be of any length, or harmful.

    ``code`` is the exit code that follows.
    """
    from ddplaunch.cli.say import say
    from ddplaunch.output.voice import Kind, Said

    said = shown(re.sub(_LONG_WORD, r"\1…\2", message), MAX_IN_MESSAGE)
    hints = [shown(line, MAX_IN_HINT) for line in (hint or "").splitlines()[:2]]
    lines = f"{click.style('Error:', fg='red', bold=True)} {said}\n" + "".join(f"  {line}\n" for line in hints)
    say(Said(Kind.ERROR, said, {"hint": "\n".join(hints) or None, "code": code}, lines))


def _confess(error: Exception) -> None:
    """Say that it is our fault, and keep the traceback for a report."""
    import tempfile
    import traceback

    said = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # what stdout is sent to
        return complain(said, "free some space, or write elsewhere", EXIT_SOFTWARE)
    try:
        # the words typed stay out: one may be a token
        details = f"ddplaunch {__version__}, Python {sys.version}\n{traceback.format_exc()}"
        with tempfile.NamedTemporaryFile(prefix="ddplaunch-bug-", suffix=".txt", delete=False) as file:
            file.write(details.encode(errors="backslashreplace"))
        kept = f"the details are in {file.name}"
    except OSError:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kept = f"it came from {last.filename}, line {last.lineno}"
    complain(f"bug in ddplaunch: {said}", f"please report it; {kept}", EXIT_SOFTWARE)


def _help_hint(error: click.ClickException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help shows more" if context is not None else None


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be any bytes


def _leave(code: int) -> None:
    """End without taking the interpreter apart: nothing of ours is left that would need it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # `| head` has read enough
            pass
    os._exit(code)
