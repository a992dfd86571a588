"""Whose option is it? Splits ``run``'s command line into our options, the target, and the program's own arguments.

Ours stand before the target, or right behind it; the first word behind it that is not ours begins the program's, and
everything after ``--`` is the program's. What could be meant either way is refused, showing both spellings.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddplaunch.errors import UsageError

MARKERS = frozenset({"-m", "--module", "--no-python"})
"""They say what kind of target follows, so they stand before it in any case and mean nothing of ours behind it."""


@dataclass(frozen=True)
class Placed:
    """The three parts; ``target`` is None where there is none."""

    ours: tuple[str, ...]
    target: str | None
    program: tuple[str, ...]


def place(words: Sequence[str], options: Mapping[str, bool]) -> Placed:
    """Split ``words``.

    Args:
        options: every spelling of every option of ours, and whether it takes a value.

    Raises:
        UsageError: an option is unknown, or could be ours as well as the program's.
    """
    ours: list[str] = []
    place = _consume(words, 0, options, ours)
    if place < len(words) and words[place] == "--":
        place += 1
    elif place < len(words) and _is_option(words[place]):
        raise _unknown(words[place], options)
    if place == len(words):
        return Placed(tuple(ours), None, ())
    before = [word for word in ours if word not in MARKERS]
    markers = [word for word in ours if word in MARKERS]
    target, rest = words[place], list(words[place + 1 :])

    behind: list[str] = []
    start = _consume(rest, 0, {name: value for name, value in options.items() if name not in MARKERS}, behind)
    if behind and before:
        raise _ambiguous(ours, behind, target, rest[start:])
    if start < len(rest) and rest[start] == "--":
        return Placed((*before, *markers, *behind), target, tuple(rest[start + 1 :]))
    program = rest[start:]
    if program and _is_option(program[0]):
        near = _one_typo(_name(program[0]), options)
        if near:
            raise UsageError(
                f"{_name(program[0])} is one letter from ddplaunch's {near}",
                f"ddplaunch's:   ddplaunch run {near} … {target}\n"
                f"the program's: {_shown(ours + behind, target, ['--', *program])}",
            )
    for index, word in enumerate(program):
        if word == "--":
            break
        if _name(word) in options and _name(word) not in MARKERS:
            found: list[str] = []
            end = _consume(program, index, options, found)
            raise _ambiguous(ours + behind, found, target, [*program[:index], *program[end:]], program)
    return Placed((*before, *markers, *behind), target, tuple(program))


def _consume(words: Sequence[str], start: int, options: Mapping[str, bool], into: list[str]) -> int:
    """Move options of ours, with their values, from ``words[start:]``; return where they end."""
    index = start
    while index < len(words):
        name = _name(words[index])
        if name not in options:
            break
        takes = options[name] and "=" not in words[index]
        into.extend(words[index : index + 1 + takes])
        index += 1 + takes
    return min(index, len(words))


def _name(word: str) -> str:
    return word.partition("=")[0] if word.startswith("--") else word


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")


def _unknown(word: str, options: Mapping[str, bool]) -> UsageError:
    near = difflib.get_close_matches(_name(word), options, 1, 0.6)
    return UsageError(
        f"no such option: {_name(word)}", f"did you mean {near[0]}?" if near else "see ddplaunch run --help"
    )


def _one_typo(name: str, options: Mapping[str, bool]) -> str | None:
    """The option of ours from which ``name`` differs by one letter added, left out, changed or swapped with the next."""
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


def _ambiguous(
    ours: list[str], found: list[str], target: str, rest: Sequence[str], program: Sequence[str] | None = None
) -> UsageError:
    whole = program if program is not None else [*found, *rest]
    return UsageError(
        f"{_name(found[0])} could be ddplaunch's or an argument of {target}",
        f"ddplaunch's:   {_shown([*ours, *found], target, rest)}\n"
        f"the program's: {_shown(ours, target, ['--', *[word for word in whole if word != '--']])}",
    )


def _shown(ours: Sequence[str], target: str, rest: Sequence[str]) -> str:
    options = [word for word in ours if word not in MARKERS]
    markers = [word for word in ours if word in MARKERS]
    return shlex.join(["ddplaunch", "run", *options, *markers, target, *rest])
