"""The command and its subcommands as click has them; each is in a file of its own."""

from __future__ import annotations

import os
import shlex
from importlib import import_module

import click
from click.shell_completion import get_completion_class

from ddplaunch import __version__
from ddplaunch.cli import COMPLETE
from ddplaunch.errors import UsageError
from ddplaunch.words import nearest

COMMANDS = {
    "run": ("cli.run_command", "Start a training job on this machine, or this machine's share of one."),
    "submit": ("commands.submit.command", "Submit a training job to Slurm, Grid Engine, PBS or LSF."),
    "manifest": ("commands.manifest.command", "Print a training job for Kubernetes as YAML."),
    "attach": ("commands.attach", "Follow a job that was submitted, to its end."),
    "ps": ("commands.runs.ps", "Show your jobs: on this machine, submitted, and ended."),
    "stacks": ("commands.stacks", "Show who waits for whom in a running job, and where each rank is."),
    "debug": ("commands.debug", "Type to the debugger of ranks that are at a breakpoint, or stop one."),
    "profile": ("commands.profile.command", "Show where the ranks of a running job spend their time."),
    "top": ("commands.top", "Show what a running job does, and where each rank stands."),
    "logs": ("commands.runs.logs", "Print what the ranks of a run print, or printed last."),
    "stop": ("commands.runs.stop", "Stop a running job."),
    "wait": ("commands.runs.stop", "Wait for the end of a job, and return its exit code."),
    "report": ("commands.runs.report", "Tell how a run ended, and what each rank used."),
    "warm": ("commands.warm", "Show, or end, what is kept to start the next runs sooner."),
    "clean": ("commands.runs.clean", "Remove what is kept of runs that have ended."),
    "doctor": ("commands.doctor.command", "Look for what would break or slow a job, on this machine or many."),
    "devices": ("commands.devices", "Show the GPUs, processors and NUMA nodes of this machine."),
}
"""The module of each, imported only when it is needed, and what it is for. Its function has the command's name."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"ddplaunch.{COMMANDS[cmd_name][0]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in COMMANDS.items()])

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
        if word in COMMANDS or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if ".py" in word or ":" in word or os.path.exists(word):
            hint = _as_run(args)
        else:
            near = nearest(word, COMMANDS)
            hint = f"did you mean {near}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise UsageError(f"{word} is not a command of ddplaunch", hint)


def _as_run(words: list[str]) -> str:
    return f"to start a job: {shlex.join(['ddplaunch', 'run', *words])}"


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddplaunch", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Start PyTorch distributed training: ddplaunch run train.py --nproc 4"""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def by_click(words: list[str]) -> object:
    """Run the words as click reads them; return what the command does.

    Raises:
        LaunchError: the words make no sense, or the command says so.
    """
    try:
        return cli.main(words, prog_name="ddplaunch", complete_var=COMPLETE, standalone_mode=False)
    except click.NoSuchOption as error:
        known = [each for param in error.ctx.command.params for each in param.opts] if error.ctx else []
        near = nearest(error.option_name, known)
        hint = f"did you mean {near}?" if near else _help_hint(error)
        raise UsageError(f"no such option: {error.option_name}", hint) from None
    except click.ClickException as error:
        raise UsageError(error.format_message().rstrip("."), _help_hint(error)) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def completion(shell: str) -> str | None:
    """The script that completes ``ddplaunch`` in a shell; None where click does not support that shell."""
    found = get_completion_class(shell)
    return found(cli, {}, "ddplaunch", COMPLETE).source() if found else None


def _help_hint(error: click.ClickException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help shows more" if context is not None else None
