"""``--grid '--lr 0.1,0.2'``: the runs of a grid, one for each combination of values, and what each is called."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import click
from msgspec import Struct

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import format_count
from ddplaunch.features.submit.batch_command import invalid_value_error

MAX_RUNS_UNASKED = 100
MAX_RUNS = 10_000
MAX_NAME_CHARS = 100


class GridAxis(Struct, frozen=True):
    """One ``--grid``: an argument of the program, and its values."""

    word: str  # "--lr", or "optimizer.lr" where the program takes optimizer.lr=0.1
    values: tuple[str, ...]
    joined: bool  # whether the program gets "--lr=0.1" in one word

    def arguments(self, value: str) -> tuple[str, ...]:
        """Return the arguments for one of the values; a value that looks like an option is joined to the name."""
        if self.joined or value.startswith("-"):
            return (f"{self.word}={value}",)
        return (self.word, value)

    @property
    def name(self) -> str:
        return self.word.lstrip("-+")


class GridRun(Struct, frozen=True):
    """One run of a grid."""

    name: str  # by what differs: "lr=0.1,seed=2"
    arguments: tuple[str, ...]


def read_axes(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[GridAxis, ...]:
    """Parse all ``--grid`` of a command line. Raises UsageError if one has no values, or two are for one argument."""
    axes = [_read_axis(ctx, param, text) for text in texts]
    for index, axis in enumerate(axes):
        if axis.name in {other.name for other in axes[:index]}:
            raise _invalid_grid_error(
                ctx, param, texts[index], f"{axis.word} has values in another --grid", "join the lists"
            )
    return tuple(axes)


def _read_axis(ctx: click.Context, param: click.Parameter, text: str) -> GridAxis:
    example = "--grid '--lr 0.1,0.2'"
    match = re.fullmatch(r"\s*([^\s=,'\"]+)(\s*=\s*|\s+)(\S.*)", text, re.DOTALL)
    if match is None:
        what = "the list of values is empty" if text.strip() else "it names no argument"
        raise _invalid_grid_error(ctx, param, text, what, example)
    try:
        values = list(split_values(match[3].strip()))
    except ValueError as error:
        raise _invalid_grid_error(ctx, param, text, str(error), example) from None
    word = match[1]
    if not word.startswith("-") and "=" not in match[2]:
        raise _invalid_grid_error(ctx, param, text, f"{word} is not an option", f"--grid '--{word} {match[3]}'")
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise _invalid_grid_error(ctx, param, text, f"{twice} is there twice", "name each value once")
    return GridAxis(word, tuple(values), "=" in match[2])


def _invalid_grid_error(ctx: click.Context, param: click.Parameter, text: str, what: str, hint: str) -> UsageError:
    return invalid_value_error(ctx, param, shlex.quote(text), what, hint)


def split_values(text: str) -> Iterator[str]:
    """Yield the values of a list; quotes, as in a shell, keep commas and blanks in a value.

    Raises ValueError for an empty value without quotes, and for a quotation mark without its end.
    """
    value, quote, was_quoted, characters = "", "", False, iter(text)
    for char in characters:
        if quote:
            if char == quote:
                quote = ""
            else:
                value += next(characters, "") if char == "\\" and quote == '"' else char
        elif char in "'\"":
            quote, was_quoted = char, True
        elif char == "\\":
            value += next(characters, "")
        elif char == ",":
            yield _check_value(value, was_quoted)
            value, was_quoted = "", False
        elif not char.isspace():
            value += char
        elif value:  # blanks around a value are left out
            raise ValueError(f"quote the value with the blank behind {value!r}, or write a comma")
    if quote:
        raise ValueError("unclosed quotation mark")
    yield _check_value(value, was_quoted)


def _check_value(value: str, was_quoted: bool) -> str:
    if not value and not was_quoted:
        raise ValueError("a value is empty; '' is the empty text")
    if "\0" in value or "\n" in value:
        raise ValueError("a value has a line break")
    return value


def expand_grid(axes: Sequence[GridAxis], own_arguments: Sequence[str], *, is_confirmed: bool) -> tuple[GridRun, ...]:
    """Return the runs, the last axis varying first.

    Raises UsageError if there are too many, or many without ``is_confirmed`` (--yes), or an argument has a value.
    """
    for axis in axes:
        if any(word == axis.word or word.startswith(f"{axis.word}=") for word in own_arguments):
            what = f"{sanitize_line(axis.word, 60)} is in --grid and among the arguments of the program"
            raise UsageError(what, "leave one of them out")
    count = prod(len(axis.values) for axis in axes)
    if count > MAX_RUNS or (count > MAX_RUNS_UNASKED and not is_confirmed):
        sizes = f"{' × '.join(str(len(axis.values)) for axis in axes)} = " if len(axes) > 1 else ""
        hint = f"at most {MAX_RUNS:,}" if count > MAX_RUNS else "--yes submits them all; --dry-run shows the script"
        raise UsageError(f"--grid makes {sizes}{format_count(count, 'run')}", hint)
    return tuple(_make_run(axes, values) for values in itertools.product(*(axis.values for axis in axes)))


def _make_run(axes: Sequence[GridAxis], values: Iterable[str]) -> GridRun:
    pairs = list(zip(axes, values, strict=True))
    arguments = tuple(word for axis, value in pairs for word in axis.arguments(value))
    name = ",".join(f"{axis.name}={value}" for axis, value in pairs)
    return GridRun(sanitize_line(name, MAX_NAME_CHARS), arguments)
