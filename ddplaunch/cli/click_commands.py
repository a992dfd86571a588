"""The ``ddplaunch`` command group of click, shell completion, and the commands ``completion`` and ``help``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from importlib import import_module
from itertools import groupby

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from ddplaunch import __version__
from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import closest_match, join_alternatives
from ddplaunch.cli.console_output import is_colour_allowed, print_note
from ddplaunch.cli.help_colours import HelpContext
from ddplaunch.core.feature import Command
from ddplaunch.core.feature_registry import load_features

COMPLETION_VARIABLE = "_DDPLAUNCH_COMPLETE"  # set by a shell's completion script (README)

_RUN = "ddplaunch.cli.run_command"

HEADINGS = ("Run", "Watch", "Diagnose", "Clusters", "Housekeeping")
"""The headings of the help, in order; headings that features add follow."""


def _find_commands() -> dict[str, Command]:
    """Return all commands in the order of the help."""
    own = (
        Command(
            "run",
            "Run a training job, or this machine's part of a multi-node job.",
            _RUN,
            "Run",
            also=("start", "launch", "exec", "train"),
        ),
        Command("completion", "Print the completion script for a shell.", __name__, "Housekeeping", 9),
        Command("help", "Show the help of a command or a page of the documentation.", __name__, "Housekeeping", 9),
    )
    found = [*own, *load_features().commands().values()]
    headings = list(dict.fromkeys([*HEADINGS, *(command.heading for command in found)]))
    found.sort(key=lambda command: (headings.index(command.heading), command.place))
    return {command.name: command for command in found}


COMMANDS = _find_commands()
"""All commands by name, those of the features too. Their modules are imported on use."""

_FOREIGN_COMMANDS = {"version": "--version"} | {word: name for name, each in COMMANDS.items() for word in each.also}
"""Names of commands in other programs, and what an error suggests."""


LAUNCHERS = r"(torchrun|accelerate|accelerate-launch|deepspeed|mpirun|mpiexec|horovodrun|srun)"
PYTHON = r"(i?python[\d.]*)"
"""Patterns of the names of other launchers, whose lines may stand after ``ddplaunch`` and ``ddplaunch run``."""


class _CommandGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name].module), cmd_name)
        if COMMANDS[cmd_name].module != _RUN:  # ``run`` calls it later, once it knows the form of messages
            print_left_out_plugins()
        assert isinstance(command, click.Command)
        command.context_class = HelpContext
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        print_left_out_plugins()
        width = max(map(len, COMMANDS))
        for heading, commands in groupby(COMMANDS.values(), key=lambda command: command.heading):
            with formatter.section(heading):
                formatter.write_dl([(command.name.ljust(width), command.summary) for command in commands])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = (
                "--version" if error.option_name == "-v" else closest_match(error.option_name, ["--version", "--help"])
            )
            if near:
                raise UsageError(f"no such option: {error.option_name}", f"did you mean {near}?") from None
            raise UsageError(f"{error.option_name} must follow a command", _suggest_run(words)) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in COMMANDS or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if ".py" in word or ":" in word or os.path.exists(word):
            hint = _suggest_run(args)
        elif re.fullmatch(f"{LAUNCHERS}|{PYTHON}", word):
            run = self.get_command(ctx, "run")
            assert run is not None
            run.make_context("run", list(args), parent=ctx)  # raises the error with the line to type
            hint = _suggest_run(args)
        else:
            near = _FOREIGN_COMMANDS.get(word) or closest_match(word, COMMANDS)
            near = near and f"ddplaunch {near}"
            hint = f"did you mean {near}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise UsageError(f'unknown command "{sanitize_line(word, 60)}"', hint)


def _suggest_run(words: list[str]) -> str:
    return f"to start a run: {shlex.join(['ddplaunch', 'run', *words])}"


_CommandGroup.context_class = HelpContext


@click.group(cls=_CommandGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="ddplaunch", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Launch PyTorch distributed training: ddplaunch run train.py --nproc 4

    `ddplaunch help COMMAND` shows the options of a command, `ddplaunch help start` the introduction.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run_with_click(words: list[str]) -> object:
    """Run a command line with click; return what the command returns.
    Raises LaunchError if the command line is invalid, or the command fails.
    """
    try:
        return cli.main(words, prog_name="ddplaunch", complete_var=COMPLETION_VARIABLE, standalone_mode=False)
    except click.NoSuchOption as error:
        known = [each for param in error.ctx.command.params for each in param.opts] if error.ctx else []
        near = closest_match(error.option_name, known)
        hint = f"did you mean {near}?" if near else _usage_hint(error)
        raise UsageError(f"no such option: {error.option_name}", hint) from None
    except click.BadParameter as error:
        raise UsageError(_bad_value(error), _usage_hint(error)) from None
    except click.ClickException as error:
        raise UsageError(error.format_message().rstrip("."), _usage_hint(error)) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def print_left_out_plugins() -> None:
    """Print, once, which plug-ins are left out; not where a shell completes a word."""
    messages = load_features().left_out
    while messages and COMPLETION_VARIABLE not in os.environ:
        print_note(messages.pop(0))


def _bad_value(error: click.BadParameter) -> str:
    """Return the error message for an invalid value; for a choice, in the same form as ``ddplaunch run`` prints."""
    if isinstance(error, click.MissingParameter):
        return _missing_value(error)
    match = re.fullmatch(r"'(.*)' is not one of .*", error.message)
    if not (match and error.param and error.ctx and isinstance(error.param.type, click.Choice)):
        return error.format_message().rstrip(".")
    option = isinstance(error.param, click.Option)
    name = error.param.opts[-1] if option else str(error.ctx.info_name)
    return (
        f"{name} {sanitize_line(match[1], 60)}: expected {join_alternatives(tuple(map(str, error.param.type.choices)))}"
    )


def _missing_value(error: click.MissingParameter) -> str:
    """Return the message about a missing argument in one line; click lists choices in lines of their own."""
    param = error.param
    command = str(error.ctx.info_name) if error.ctx else "the command"
    if param is None:
        return f"{command} needs another argument"
    if isinstance(param.type, click.Choice):
        return f"{command} needs {join_alternatives(tuple(map(str, param.type.choices)))}"
    return f"{command} needs {param.human_readable_name}"


class _BashCompletion(BashComplete):
    """Completion for bash, which splits file.py:function into three words; this class joins them."""

    _typed = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        count = int(os.environ["COMP_CWORD"]) + 1
        given = split_arg_string(os.environ["COMP_WORDS"])[:count]
        words: list[str] = []
        for at, word in enumerate([*given, ""] if len(given) < count else given):
            if words and (word == ":" or (at and given[at - 1] == ":")):
                words[-1] += word
            else:
                words.append(word)
        self._typed = words[-1]
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        before, colon, _ = self._typed.rpartition(":")
        return f"{item.type},{item.value.removeprefix(before + colon)}"


class _ZshCompletion(ZshComplete):
    """Completion for zsh; its script loads zsh's completion system first if ~/.zshrc has not loaded it."""

    source_template = ZshComplete.source_template.replace(
        "    compdef ", "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n    compdef "
    )


add_completion_class(_BashCompletion)
add_completion_class(_ZshCompletion)


def completion_script(shell: str) -> str | None:
    """Return the completion script for a shell, None if click does not support it."""
    found = get_completion_class(shell)
    return found(cli, {}, "ddplaunch", COMPLETION_VARIABLE).source() if found else None


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the script for completion in a shell.

    \b
      bash: eval "$(ddplaunch completion bash)" in ~/.bashrc
      zsh:  eval "$(ddplaunch completion zsh)" in ~/.zshrc
      fish: ddplaunch completion fish > ~/.config/fish/completions/ddplaunch.fish
    """
    click.echo(completion_script(shell))


@click.command()
@click.argument("topic", required=False)
@click.pass_context
def help(ctx: click.Context, topic: str | None) -> None:
    """Show the help of a command or a page of the documentation.

    TOPIC is a command, like run, or a page, like start, torchrun or hangs. Without it, all are listed.
    """
    assert ctx.parent is not None
    if topic in COMMANDS:
        command = cli.get_command(ctx, topic)
        assert command is not None
        with command.make_context(topic, ["--help"], parent=ctx.parent):
            return
    pages = _pages()
    topic = _OTHER_TOPICS.get(topic, topic) if topic else None
    if topic is None:
        click.echo(ctx.parent.get_help())
        click.echo(
            f"\nPages:\n{textwrap.fill(' '.join(sorted(pages)), 78, initial_indent='  ', subsequent_indent='  ')}"
        )
    elif topic in pages:
        _show_page(pages[topic])
    else:
        near = closest_match(topic, [*COMMANDS, *pages])
        hint = f"did you mean ddplaunch help {near}?" if near else "ddplaunch help lists the commands and pages"
        raise UsageError(f'no command or page named "{sanitize_line(topic, 60)}"', hint)


_OTHER_TOPICS = {
    **{"live": "runs", "effective": "goodput", "sidecar": "programs", "scale": "performance", "faults": "performance"},
    **dict.fromkeys(("gridengine", "sge", "pbs-lsf", "pbs", "lsf"), "schedulers"),
    **dict.fromkeys(("accelerate", "deepspeed", "mpirun", "lightning", "ray"), "coming-from"),
}
"""Words that are not the name of a page, and the page that describes each."""


def _show_page(path: str) -> None:
    """Show a page: rendered in a terminal, as Markdown elsewhere."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if not sys.stdout.isatty():
        return click.echo(text)
    from ddplaunch.cli.page_view import render_page  # rich, which takes longer than all other help

    colour = is_colour_allowed()
    click.echo_via_pager(render_page(text, shutil.get_terminal_size().columns, colour=colour), color=colour)


def _pages() -> dict[str, str]:
    """Return the path of each page of the documentation by name: in the package, or next to it in a checkout."""
    for folder in (os.path.join(PACKAGE_DIR, "docs"), os.path.join(os.path.dirname(PACKAGE_DIR), "docs")):
        if os.path.isfile(os.path.join(folder, "start.md")):
            return {name[:-3]: os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".md")}
    return {}


def _usage_hint(error: click.ClickException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help shows more" if context is not None else None
