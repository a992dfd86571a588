"""Commands that start a target: which words of the line are ours, the help by headings, the target found and checked.

``run`` starts it here, ``submit`` hands it to a scheduler; both read a command line in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.cli.placement import FEW, HELP, Placed, goes_on, passed_on, place
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.cli.torchrun.dialect import Translation
    from ddplaunch.target.target import Target

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "allow_interspersed_args": False,
    "max_content_width": 110,
}
"""The context settings of such a command."""

TORCHRUN_SIGNS = ("PET_", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""How the variables begin that stand for torchrun's options."""

NOTES = "ddplaunch.torchrun"
"""Where the context keeps what people should know of torchrun's options."""

ALIKE = "ddplaunch.alike"
"""Where it keeps the note on options that went to the program and are spelled like ours."""

PASSED_ON = "ddplaunch.passed_on"
"""Where it keeps how to pass on a ``--dry-run`` that stood behind the target."""


class TargetCommand(click.Command):
    """Knows which words are its own: click alone would take every option up to the first positional word."""

    sections: Mapping[str, Sequence[str]]
    """The headings of the help, and the options under each."""
    starts_here = True
    """Whether the job starts in our own surroundings, so that variables count."""
    refused: Mapping[str, str] = {}
    """Options of torchrun that make no sense here, and what to do instead."""
    skipped: Collection[str] = ()
    """Those that mean something else here."""
    few: Collection[str] = FEW
    """What is ours right behind the target too."""

    def place(self, ctx: click.Context, words: list[str], **how: Any) -> Placed:
        """Split the words typed; a subclass may know more options, or read them in another way."""
        return place(words, self.spellings(ctx), program_names(), few=self.few, **how)

    def spellings(self, ctx: click.Context) -> dict[str, bool]:
        """Every spelling of every option of ours, and whether it takes a value."""
        return spellings(self.get_params(ctx))

    def translated(self, ctx: click.Context, words: list[str]) -> Translation | None:
        """The words typed, with torchrun's options as ours. Most people use none, and need not load what knows them."""
        environ = os.environ if self.starts_here else {}
        if not (goes_on(words, self.spellings(ctx)) or any(name.startswith(TORCHRUN_SIGNS) for name in environ)):
            return None
        from ddplaunch.cli.torchrun import dialect as torchrun

        return torchrun.translate(words, self.spellings(ctx), environ, refused=self.refused, skipped=self.skipped)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion looks at half a line
            return super().parse_args(ctx, args)
        how = {}
        if translation := self.translated(ctx, args):
            args, ctx.meta[NOTES] = translation.words, translation.notes
            how = {"ends_at_target": translation.of_torchrun, "unsaid": translation.unsaid}
        placed = self.place(ctx, args, **how)
        if placed.target is None and not HELP & set(placed.ours):
            takes = self.spellings(ctx)
            values = [pair for pair in zip(placed.ours, placed.ours[1:], strict=False) if takes.get(pair[0])]
            taken = f"; {values[-1][1]} was taken for the value of {values[-1][0]}" if values else ""
            raise UsageError(
                f"there is no target{taken}", f"name a script or a function: ddplaunch {self.name} train.py"
            )
        if placed.alike:
            *first, last = placed.alike
            named = f"{', '.join(first)} and {last} go" if first else f"{last} goes"
            ctx.meta[ALIKE] = f"note: {named} to {placed.target}; ddplaunch's own options stand before it"
        if command := passed_on(placed):
            ctx.meta[PASSED_ON] = f"--dry-run was read as ddplaunch's; to pass it on: {command}"
        target = [] if placed.target is None else [placed.target]
        return super().parse_args(ctx, [*placed.ours, "--", *target, *placed.program])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {max(param.opts, key=len): param.get_help_record(ctx) for param in self.get_params(ctx)}
        for heading, names in self.sections.items():
            shown = [record for name in names if (record := records[name])]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)


def spellings(params: Sequence[click.Parameter]) -> dict[str, bool]:
    """Every spelling of every option among ``params``, and whether it takes a value."""
    return {
        name: isinstance(param, click.Option) and not param.is_flag
        for param in params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("-")
    }


def program_names() -> Callable[[Placed, str], bool]:
    """Whether the target's own file names an option; the file is read when the first one is asked for."""
    found: list[Target | None] = []

    def names(placed: Placed, option: str) -> bool:
        if not found:
            found.append(_found(placed))
        return found[0] is not None and found[0].names_option(option)

    return names


def _found(placed: Placed) -> Target | None:
    from ddplaunch.target.target import find

    markers = set(placed.ours)
    as_module, as_program = bool(markers & {"-m", "--module"}), "--no-python" in markers
    try:
        return find(placed.target or "", (), as_module=as_module, as_program=as_program, cwd=current_directory())
    except UsageError:  # said later, in its place
        return None


def current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current directory is not there any more", "cd to one that is") from None


def find_target(typed: str, args: tuple[str, ...], flags: Mapping[str, Any]) -> Target:
    """Find the target and check it against its arguments and the options, without running any of it.

    Raises:
        UsageError: it is not there, cannot be run, lacks an argument, or an option contradicts what it is.
    """
    from ddplaunch.target.target import Kind, find

    found = find(typed, args, as_module=flags["module"], as_program=flags["no_python"], cwd=current_directory())
    if found.signature is not None:
        from ddplaunch.target.arguments import check

        try:
            check(found.signature, found.args)
        except UsageError as error:
            alike = click.get_current_context().meta.get(ALIKE, "").removeprefix("note: ")
            raise UsageError(error.message, "\n".join(filter(None, (error.hint, alike)))) from None
    reads = found.signature is None or found.signature.reads_argv
    if flags["pass_local_rank"] and not reads:
        raise UsageError(
            f"--pass-local-rank is for programs that read their arguments, and {typed} is called with its parameters",
            "a parameter named local_rank gets it",
        )
    for name in flags["preload"].split(",") if flags["preload"] else ():
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"--preload {flags['preload']}: {name!r} is not the name of a module", "--preload torch,numpy"
            )
    if flags["start"] == "exec" and flags["preload"]:
        raise UsageError("--preload and --start exec contradict each other", "leave one of them out")
    if found.kind is Kind.PROGRAM and (flags["start"] == "zygote" or flags["preload"]):
        raise UsageError("--no-python runs a program, and only Python can be forked", "leave --start and --preload out")
    return found
