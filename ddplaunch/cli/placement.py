"""Whose option is it? Splits a command line into our options, the target, and the program's own arguments.

Ours stand before the target, or right behind it; the first word behind it that is not ours begins the program's, and
everything behind ``--`` is the program's. What could be meant either way is refused, showing both spellings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.errors import UsageError

MARKERS = frozenset({"-m", "--module", "--no-python"})
"""They say what kind of target follows, so they stand before it in any case and mean nothing of ours behind it."""

HELP = frozenset({"-h", "--help"})
"""Every program has them, so behind a target they are never surely ours."""

ELSEWHERE = {
    "--nproc-per-node": "--nproc",  # torchrun
    "--num-processes": "--nproc",  # accelerate
    "--np": "--nproc",  # horovodrun, mpirun
    "-np": "--nproc",
    "-n": "--nproc",
    "--num-gpus": "--nproc",  # deepspeed
    "--include": "--gpus",
    "--num-nodes": "--nnodes",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--rdzv-endpoint": "--master-addr",
    "--redirects": "--log-dir",
    "--tee": "--log-dir",
}
"""What other launchers call it."""


class Placed(NamedTuple):
    """The three parts; ``target`` is None where there is none."""

    ours: tuple[str, ...]
    target: str | None
    program: tuple[str, ...]


def place(
    words: Sequence[str],
    options: Mapping[str, bool],
    knows: Callable[[Placed, str], bool] = lambda placed, name: False,
    *,
    apart: Collection[str] = (),
    neutral: Collection[str] = (),
    elsewhere: Mapping[str, str] = ELSEWHERE,
) -> Placed:
    """Split ``words``.

    Args:
        options: every spelling of every option of ours, and whether it takes a value.
        knows: whether a program itself has an option of this name, as far as can be seen without running it.
        apart: the options of a second kind: these may all stand on one side of the target, and the others on the other.
        neutral: options that stand before the target beside those of either kind.
        elsewhere: what other programs call an option of ours.

    Raises:
        UsageError: an option is unknown or lacks its value, or could be ours as well as the program's.
    """
    end = end_of_ours(words, options)
    ours, rest = tuple(words[:end]), list(words[end:])
    verbatim = rest[:1] == ["--"]
    if verbatim:
        del rest[0]
    elif rest and is_option(rest[0]):
        raise _unknown(rest[0], options, elsewhere)
    if not rest:
        return Placed(ours, None, ())
    target = rest.pop(0)
    if verbatim:
        return Placed(ours, target, tuple(rest))

    options = {name: takes for name, takes in options.items() if name not in MARKERS}
    alone = Placed(ours, target, ())
    try:
        end = end_of_ours(rest, options)
    except UsageError:
        raise _refusal("", alone, rest, options) from None
    behind, program = tuple(rest[:end]), rest[end:]
    names = [name_of(word) for word in behind if name_of(word) in options]
    before = {name_of(word) in apart for word in ours if name_of(word) in options.keys() - neutral}  # their kinds
    disputed = [name for name in names if (name in apart) in before or name in HELP or knows(alone, name)]
    if disputed:
        raise _refusal(f"{disputed[0]} could be ddplaunch's or an argument of {target}", alone, rest, options)
    if program[:1] == ["--"]:
        return Placed(ours + behind, target, tuple(program[1:]))
    alone = Placed(ours + behind, target, ())
    if among := _among(program, options):
        raise _refusal(f"{among} could be ddplaunch's or an argument of {target}", alone, program, options)
    near = _slip(program, options)
    if near and not knows(alone, name_of(program[0])):
        meant = [near + program[0].removeprefix(name_of(program[0])), *program[1:]]
        message = f"{name_of(program[0])} could be meant as ddplaunch's {near}"
        raise _refusal(message, alone, program, options, meant)
    return Placed(ours + behind, target, tuple(program))


def goes_on(words: Sequence[str], options: Mapping[str, bool]) -> bool:
    """Whether options that are not ours follow those of ours that ``words`` begin with."""
    end = end_of_ours(words, options)
    return end < len(words) and is_option(words[end])


def end_of_ours(words: Sequence[str], options: Mapping[str, bool], start: int = 0) -> int:
    """Where the options of ours that begin at ``start`` end, their values included.

    Raises:
        UsageError: one lacks its value.
    """
    while start < len(words) and (name := name_of(words[start])) in options:
        if options[name] and "=" not in words[start]:
            start += 1
            if start == len(words):
                raise UsageError(f"{name} needs a value", "ddplaunch run --help says which")
            if words[start].startswith("--") or words[start] in MARKERS | HELP:
                raise UsageError(
                    f"{name} needs a value, and {words[start]} looks like an option",
                    f"{name}={words[start]}, if that is its value",
                )
        start += 1
    return start


def name_of(word: str) -> str:
    """An option without its value."""
    return word.partition("=")[0] if word.startswith("--") else word


def is_option(word: str) -> bool:
    """Whether it looks like an option, anybody's."""
    return word.startswith("-") and word not in ("-", "--")


def _among(program: Sequence[str], options: Mapping[str, bool]) -> str | None:
    """The first option of ours among a program's arguments, as far as they go before a ``--``."""
    for word in program:
        if word == "--":
            break
        if name_of(word) in options:
            return name_of(word)
    return None


# --------------------------------------------------------------------------------------------------------- spellings


def _refusal(
    message: str, alone: Placed, rest: Sequence[str], options: Mapping[str, bool], meant: Sequence[str] = ()
) -> UsageError:
    """Say what is unclear with both spellings to choose from, or with one where the other would make no sense.

    Args:
        alone: what is clear. rest: the words behind it. meant: the same, as they would be if they were ours.
    """
    theirs = f"the program's: {_spelled(alone._replace(program=tuple(rest)), options)}"
    try:
        found, left = _gather(meant or rest, options)
    except UsageError as error:
        return UsageError(error.message, theirs)
    ours = f"ddplaunch's:   {_spelled(Placed(alone.ours + found, alone.target, left), options)}"
    return UsageError(message, f"{ours}\n{theirs}")


def _gather(words: Sequence[str], options: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read every option of ours in ``words`` as ours; return them and what is left."""
    found: list[str] = []
    left: list[str] = []
    start = 0
    while start < len(words) and words[start] != "--":
        end = end_of_ours(words, options, start)
        found += words[start:end]
        if end == start:
            left.append(words[start])
        start = max(end, start + 1)
    return tuple(found), (*left, *words[start if left else start + 1 :])


def _spelled(placed: Placed, options: Mapping[str, bool]) -> str:
    """Write a command line that ``place`` reads as ``placed``."""
    import shlex

    target, program = placed.target or "", placed.program
    words = [word for word in placed.ours if word not in MARKERS] + [word for word in placed.ours if word in MARKERS]
    if target.startswith("-"):
        words += ["--", target]
    elif program[:1] == ("--",) or _among(program, options) or _slip(program, options):
        words += [target, "--"]
    else:
        words.append(target)
    return shlex.join(["ddplaunch", "run", *words, *program])


# ------------------------------------------------------------------------------------------------------------- slips


def _unknown(word: str, options: Mapping[str, bool], elsewhere: Mapping[str, str]) -> UsageError:
    import difflib

    name = name_of(word)
    dashed = hyphened(name)
    near = dashed if dashed in options else elsewhere.get(dashed) or _one_letter_off(name, options)
    near = near or next(iter(difflib.get_close_matches(name, options, 1, 0.6)), None)
    if name.startswith("-m") and len(name) > 2:
        near = f"-m {name[2:]}"
    hint = f"did you mean {near}?" if near else "ddplaunch run --help lists them; a target like that stands behind --"
    return UsageError(f"no such option: {name}", hint)


def _slip(program: Sequence[str], options: Mapping[str, bool]) -> str | None:
    """The option of ours that the first word of a program's arguments was probably meant to be."""
    if not program or not is_option(program[0]) or name_of(program[0]) in options:
        return None
    name = name_of(program[0])
    dashed = hyphened(name)
    if dashed == "--nproc-per-node":
        return ELSEWHERE[dashed]
    return dashed if dashed in options else _one_letter_off(name, options)


def hyphened(name: str) -> str:
    """An option with dashes where somebody typed underscores."""
    return name[:2] + name[2:].replace("_", "-")


def _one_letter_off(name: str, options: Mapping[str, bool]) -> str | None:
    """The option from which ``name`` differs by one letter: added, left out, changed or swapped with the next."""
    for option in options:
        if len(option) > 4 and _distance_is_one(name, option):
            return option
    return None


def _distance_is_one(one: str, two: str) -> bool:
    if abs(len(one) - len(two)) > 1 or one == two:
        return False
    start = 0
    while start < min(len(one), len(two)) and one[start] == two[start]:
        start += 1
    a, b = one[start:], two[start:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or (len(a) > 1 and a[:2] == b[1::-1] and a[2:] == b[2:])
