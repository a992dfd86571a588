"""What was typed for a command that starts a target: what there is to remark, and the target, found and checked.

click has no part in it: loading that costs more than all that is here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import cache

from ddplaunch.cli.command_line import (
    SplitArgv,
    TranslatedArgv,
    command_with_dry_run_for_program,
    has_unknown_option,
    option_name,
)
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError
from ddplaunch.target.target import Target, TargetKind, find_target

TORCHRUN_VARIABLE_PREFIXES = ("PET_", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
"""How the variables begin that stand for torchrun's options."""


@dataclass(frozen=True)
class ParseNotes:
    """What reading the command line has shown beside the values."""

    torchrun_notes: tuple[str, ...] = ()  # what people should know of torchrun's options
    lookalike_note: str | None = None  # a note on options that went to the program and are spelled like ours
    alternative_command: str | None = None  # the command that gives the target the --dry-run behind it
    from_variables: frozenset[str] = frozenset()  # the options that torchrun's variables have set


def translate_torchrun(
    words: list[str],
    known: Mapping[str, bool],
    environ: Mapping[str, str],
    *,
    refused: Mapping[str, str] = {},
    skipped: Collection[str] = (),
) -> TranslatedArgv:
    """The words typed, with torchrun's options as ours; if there are none, nothing of it is imported."""
    if not (has_unknown_option(words, known) or any(name.startswith(TORCHRUN_VARIABLE_PREFIXES) for name in environ)):
        return TranslatedArgv(words)
    from ddplaunch.cli.torchrun.dialect import translate

    return translate(words, known, environ, refused=refused, skipped=skipped)


def check_target(line: SplitArgv, known: Mapping[str, bool], command: str) -> None:
    """Refuse a line without a target."""
    if line.target is None:
        values = [pair for pair in zip(line.options, line.options[1:], strict=False) if known.get(pair[0])]
        taken = f"; {values[-1][1]} was taken for the value of {values[-1][0]}" if values else ""
        hint = f"name a script or a function: ddplaunch {command} train.py"
        raise UsageError(f"the target is missing{taken}", hint)


def parse_notes_for(line: SplitArgv, translation: TranslatedArgv) -> ParseNotes:
    """What there is to say of the words typed, which were read as this line."""
    alike = None
    if line.lookalikes:
        *first, last = line.lookalikes
        named = f"{', '.join(first)} and {last} go" if first else f"{last} goes"
        alike = f"{named} to {line.target}; options of ddplaunch come before it"
    unsaid = translation.env_only_options - set(map(option_name, line.trailing_options))
    return ParseNotes(translation.notes, alike, command_with_dry_run_for_program(line), unsaid)


def make_option_lookup() -> Callable[[SplitArgv, str], bool]:
    """Whether the target's own file names an option; the file is read when the first one is asked for."""

    @cache
    def found(target: str, as_module: bool, as_program: bool) -> Target | None:
        try:
            return find_target(target, (), as_module=as_module, as_program=as_program, cwd=current_directory())
        except UsageError:  # said later, in its place
            return None

    def names(line: SplitArgv, option: str) -> bool:
        target = found(
            line.target or "", not {"-m", "--module"}.isdisjoint(line.options), "--no-python" in line.options
        )
        return target is not None and target.has_option(option)

    return names


def current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist any more", "cd to one that exists") from None


@dataclass(frozen=True)
class TargetOptions:
    """The options that say what to run, and how it is started."""

    target: str
    args: tuple[str, ...]
    module: bool
    no_python: bool
    pass_local_rank: bool
    start: str
    preload: str | None


def resolve_target(typed: TargetOptions, alike: str | None) -> Target:
    """Find the target and check it against its arguments and the options, without running any of it.

    ``lookalike_note`` is the remark on arguments that are spelled like options of ours.

    Raises:
        UsageError: it is not there, cannot be run, lacks an argument, or an option contradicts what it is.
    """
    where, preload = current_directory(), typed.preload
    target = find_target(typed.target, typed.args, as_module=typed.module, as_program=typed.no_python, cwd=where)
    if target.signature is not None:
        from ddplaunch.target.arguments import check_arguments, function_help, is_help_request

        if is_help_request(target.signature, target.args):
            print(function_help(target.signature), end="")
            raise SystemExit(0)
        try:
            check_arguments(target.signature, target.args)
        except UsageError as error:
            raise UsageError(error.message, "\n".join(filter(None, (error.hint, alike)))) from None
    if typed.pass_local_rank and target.signature is not None and not target.signature.reads_argv:
        what = f"--pass-local-rank does not work with {typed.target}, which is called with its parameters"
        raise UsageError(what, "a parameter named local_rank gets it")
    for name in preload.split(",") if preload else ():
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {preload}: {name!r} is not the name of a module", "--preload torch,numpy")
    if typed.start == "exec" and preload:
        raise UsageError("--preload does not work with --start exec", "leave one of them out")
    if target.kind is TargetKind.PROGRAM and (typed.start == "zygote" or preload):
        option = "--preload" if preload else "--start zygote"
        raise UsageError(f"{option} does not work with --no-python: only Python can be forked", f"leave {option} out")
    return target
