"""Finds and checks the target of a command line, and collects notes on how the line was read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Options
from ddplaunch.cli.argv_splitter import (
    ArgvParts,
    TranslatedArgv,
    command_with_dry_run_for_program,
    end_of_options,
    has_unknown_option,
    is_option,
    option_name,
)
from ddplaunch.cli.click_commands import LAUNCHERS, PYTHON
from ddplaunch.cli.torchrun.translator import translate
from ddplaunch.core.options import TargetOptions
from ddplaunch.system.target.argument_parser import check_arguments, function_help, is_help_request
from ddplaunch.system.target.target import Target, find_target

TORCHRUN_VARIABLE_PREFIXES = ("PET_", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
"""Prefixes of the variables that set torchrun's options."""


class ParseNotes(Struct, frozen=True):
    """Notes on how a command line was read."""

    torchrun_notes: tuple[str, ...] = ()  # on the translation of torchrun's options, and on variables
    lookalike_note: str | None = None  # options of ddplaunch's that went to the program
    alternative_command: str | None = None  # the command that passes a trailing --dry-run to the program
    from_variables: frozenset[str] = frozenset()  # options set by torchrun's variables


_LAUNCHERS = re.compile(
    rf"(.*/)?({LAUNCHERS}|{PYTHON}|env)"
    r"|[A-Za-z_]\w*=.*|torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.runner"
    r"|--(num|machine|main|enable)[-_].*|--npernode|--map-by|-np|-npernode|-H"
)
"""What a line of another launcher begins with; ``cli/pasted`` reads it."""


def check_not_pasted(words: Sequence[str], known: Mapping[str, bool], *, options: bool = True) -> None:
    """Raise UsageError if the words after the options are a line of another launcher, with the line to type.

    ``options``: also if they begin with an option that only another launcher has.
    """
    end = end_of_options(words, known)
    first = next((word for word in words[end : end + 2] if word != "--"), "")
    if _LAUNCHERS.fullmatch(option_name(first)) and (options or not is_option(first)):
        from ddplaunch.cli.pasted import pasted_line  # few lines need it

        pasted_line.check_not_other_launcher(words, known)


def translate_torchrun(
    words: list[str],
    known: Mapping[str, bool],
    environ: Mapping[str, str],
    *,
    refused: Mapping[str, str] = {},
    skipped: Collection[str] = (),
) -> TranslatedArgv:
    """Translate torchrun's options, in words and variables. Raises UsageError for a whole line of another launcher."""
    check_not_pasted(words, known, options=not skipped)
    if not (has_unknown_option(words, known) or any(name.startswith(TORCHRUN_VARIABLE_PREFIXES) for name in environ)):
        return TranslatedArgv(words)

    return translate(words, known, environ, refused=refused, skipped=skipped)


def check_target(line: ArgvParts, known: Mapping[str, bool], command: str) -> None:
    """Check that a command line has a target. Raises UsageError if not."""
    if line.target is None:
        values = [pair for pair in zip(line.options, line.options[1:], strict=False) if known.get(pair[0])]
        taken = f"; {values[-1][1]} was taken for the value of {values[-1][0]}" if values else ""
        hint = f"name a script or a function: ddplaunch {command} train.py"
        raise UsageError(f"the target is missing{taken}", hint)


def make_parse_notes(line: ArgvParts, translation: TranslatedArgv, notes: tuple[str, ...] = ()) -> ParseNotes:
    """Return the notes on a command line, ``notes`` among them."""
    lookalikes = None
    if line.lookalikes:
        *first, last = line.lookalikes
        named = f"{', '.join(first)} and {last} go" if first else f"{last} goes"
        lookalikes = f"{named} to {line.target}; options of ddplaunch come before it"
    from_variables = translation.env_only_options - set(map(option_name, line.trailing_options))
    return ParseNotes((*translation.notes, *notes), lookalikes, command_with_dry_run_for_program(line), from_variables)


def make_option_lookup() -> Callable[[ArgvParts, str], bool]:
    """Return a function that says whether the target's source file names an option; its first call reads the file."""

    @cache
    def find(target: str, as_module: bool, as_program: bool) -> Target | None:
        try:
            return find_target(target, (), as_module=as_module, as_program=as_program, cwd=require_current_folder())
        except UsageError:  # reported later by ``resolve_target``
            return None

    def has_option(line: ArgvParts, option: str) -> bool:
        target = find(line.target or "", not {"-m", "--module"}.isdisjoint(line.options), "--no-python" in line.options)
        return target is not None and target.has_option(option)

    return has_option


def require_current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UsageError("the current folder does not exist any more", "cd to one that exists") from None


def resolve_target(options: Options, lookalike_note: str | None) -> Target:
    """Find the target and check its arguments and options, without running any of its code.

    ``lookalike_note`` is added to errors about the arguments.
    Raises UsageError if the target does not exist, cannot be run, lacks an argument, or contradicts an option.
    """
    typed = options[TargetOptions]
    where = require_current_folder()
    target = find_target(typed.target, typed.args, as_module=typed.module, as_program=typed.no_python, cwd=where)
    if target.signature is not None:
        if is_help_request(target.signature, target.args):
            print(function_help(target.signature), end="")
            raise SystemExit(0)
        try:
            check_arguments(target.signature, target.args)
        except UsageError as error:
            raise UsageError(error.message, "\n".join(filter(None, (error.hint, lookalike_note)))) from None
    if typed.pass_local_rank and target.signature is not None and not target.signature.reads_argv:
        what = f"--pass-local-rank does not work with {typed.target}, which is called with its parameters"
        raise UsageError(what, "a parameter named local_rank gets it")
    options.check_target()
    return target
