"""Splits the options of another launcher from the target, and collects their equivalents of ddplaunch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddplaunch.cli.argv_splitter import is_option, underscores_to_dashes


class ForeignSyntax(Struct, frozen=True):
    """The options that another launcher accepts; their names have dashes in place of underscores."""

    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()  # options with two values, as mpirun's --mca
    aliases: Mapping[str, str] = {}  # the short name, and the one in the sets above


class ForeignOptions(Struct):
    """The options that were parsed from the command line of another launcher, in order."""

    given: dict[str, list[str]]  # by name; "" for a flag
    own: list[str]  # words that only ddplaunch knows
    unknown: list[str]  # options that neither launcher knows, each with what looks like its value
    rest: list[str]  # the target and its arguments
    spellings: dict[str, str]  # of each name, as typed

    def take(self, *names: str) -> str | None:
        """Remove the named options and return the last value of the last one that is given; None if none is given."""
        found = [values[-1] for name in names if (values := self.given.pop(name, None))]
        return found[-1] if found else None

    def take_flag(self, *names: str) -> bool:
        return self.take(*names) is not None

    def left_over(self) -> tuple[str, ...]:
        """Return the options that ``take`` has not removed: ddplaunch has no equivalent of them."""
        left = [
            " ".join(filter(None, (self.spellings[name], value)))
            for name, values in self.given.items()
            for value in values
        ]
        return (*left, *self.unknown)


class TranslatedLine(Struct, frozen=True):
    """The command line of another launcher, translated to the options of ddplaunch."""

    options: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()  # the target and its arguments
    variables: tuple[str, ...] = ()  # NAME=VALUE, before the command
    without_equivalent: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()  # the command that starts ddplaunch: srun and its options


def split_foreign_options(words: Sequence[str], syntax: ForeignSyntax, own: Mapping[str, bool]) -> ForeignOptions:
    """Split a launcher's options from the target; ``own``: ddplaunch's spellings, and whether each takes a value."""
    options, rest = ForeignOptions({}, [], [], [], {}), list(words)
    while rest and is_option(rest[0]):
        word, equals, value = rest.pop(0).partition("=")
        name = underscores_to_dashes(word)
        if short := re.fullmatch(r"(-[a-zA-Z])(\d+)", name):  # -n4
            name, equals, value = short[1], "=", short[2]
        name = syntax.aliases.get(name, name)
        options.spellings[name] = word
        if name in syntax.pairs:
            options.given.setdefault(name, []).append(" ".join(rest[:2]))
            del rest[:2]
        elif name in syntax.flags:
            options.given.setdefault(name, []).append("")
        elif name in syntax.values:
            options.given.setdefault(name, []).append(value if equals else rest.pop(0) if rest else "")
        elif word in own:
            takes = own[word] and not equals
            options.own += [word + equals + value, *rest[: int(takes)]]
            del rest[: int(takes)]
        else:
            has_value = not equals and rest and not is_option(rest[0]) and not _may_be_target(rest[0])
            options.unknown.append(f"{word} {rest.pop(0)}" if has_value else word + equals + value)
    options.rest = rest[1:] if rest[:1] == ["--"] else rest
    return options


def _may_be_target(word: str) -> bool:
    return (
        word.endswith(".py")
        or ".py:" in word
        or os.path.isfile(word)
        or bool(re.fullmatch(r"(.*/)?python[\d.]*", word))
    )
