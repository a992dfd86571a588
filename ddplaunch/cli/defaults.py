"""Defaults that a project or a user has written down: ``[tool.ddplaunch.submit]`` and ``~/.config/ddplaunch.toml``.

The project's are in the pyproject.toml nearest above the current folder, the user's in ``[submit]`` of
``ddplaunch.toml`` in XDG_CONFIG_HOME (XDG Base Directory Specification). Keys are the names of the options without
their dashes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ddplaunch.errors import UsageError


@dataclass(frozen=True)
class Default:
    """A value that stands in a file: as the option's own reader takes it, and where it stands."""

    value: str | bool | tuple[str, ...]
    file: str


def read(command: str, options: Sequence[click.Option], cwd: str, environ: Mapping[str, str]) -> dict[str, Default]:
    """Read the defaults of a command's options, by click's names for them; the project's go before the user's.

    Raises:
        UsageError: a file is no TOML, has a key that is not known, or a value of the wrong type.
    """
    found: dict[str, Default] = {}
    for file, path in _files(cwd, environ):
        found = {**_of_file(file, path, command, options), **found}
    return found


def _files(cwd: str, environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each file that there is, the first to be heard first, with the tables that lead to ours."""
    folder = cwd
    while True:
        file = os.path.join(folder, "pyproject.toml")
        if os.path.isfile(file):
            yield file, ("tool", "ddplaunch")
            break
        if folder == (folder := os.path.dirname(folder)):
            break
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    file = os.path.join(config, "ddplaunch.toml")
    if os.path.isabs(config) and os.path.isfile(file):
        yield file, ()


def _of_file(file: str, path: tuple[str, ...], command: str, options: Sequence[click.Option]) -> dict[str, Default]:
    table: Any = _parse(file)
    for name in path:
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {'.'.join(path)} is no table")
    for name in table:
        if name != command:
            heading = ".".join((*path, name))
            raise UsageError(f"{file}: nothing is known of [{heading}]", f"there is [{'.'.join((*path, command))}]")
    table = table.get(command, {})
    heading = f"[{'.'.join((*path, command))}]"
    if not isinstance(table, dict):
        raise UsageError(f"{file}: {heading} is no table")
    known = {option.opts[-1].removeprefix("--"): option for option in options}
    found: dict[str, Default] = {}
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{file}: {heading} has no key {key}", _near(key, known))
        option = known[key]
        found[option.name or ""] = Default(_typed(value, option, f"{file}: {heading} {key}"), file)
    return found


def _parse(file: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(file, "rb") as stream:
            table: dict[str, Any] = tomllib.load(stream)
            return table
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is no TOML: {error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is no TOML: it is not UTF-8") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def _typed(value: object, option: click.Option, place: str) -> str | bool | tuple[str, ...]:
    """Turn a value into what the option would have on a command line."""
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise UsageError(f"{place} = {value!r}: true or false is wanted")
    if option.multiple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise UsageError(f"{place} = {value!r}: a list of strings is wanted", f'{option.opts[-1][2:]} = ["…", "…"]')
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise UsageError(f"{place} = {value!r}: a string or a whole number is wanted")


def _near(key: str, known: Mapping[str, click.Option]) -> str:
    import difflib

    near = difflib.get_close_matches(key.replace("_", "-"), known, 1, 0.5)
    return f"did you mean {near[0]}?" if near else f"its keys: {', '.join(known)}"
