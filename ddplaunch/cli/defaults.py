"""Defaults that a project or a user has written down: ``[tool.ddplaunch.submit]`` and ``~/.config/ddplaunch.toml``.

The project's are in the pyproject.toml nearest above the current folder, the user's in ``[submit]`` of
``ddplaunch.toml`` in XDG_CONFIG_HOME (XDG Base Directory Specification). Keys are the names of the options without
their dashes.

What these files say runs as the user (``setup``), so only the user's own and root's are read, as git does with its
``safe.directory`` (CVE-2022-24765), and none that is far above. ``--config FILE`` reads one whoever it belongs to.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ddplaunch.errors import UsageError
from ddplaunch.files import read_owned
from ddplaunch.words import nearest

PROJECT = "pyproject.toml"
NONE = "none"
"""What ``--config`` calls reading no file."""

MAX_BYTES = 1 << 20
"""Bytes of a file; one that is larger was not written for us."""


@dataclass(frozen=True)
class Default:
    """A value that stands in a file: as the option's own reader takes it, and where it stands."""

    value: str | bool | tuple[str, ...]
    file: str


def read(
    command: str, options: Sequence[click.Option], cwd: str, environ: Mapping[str, str], named: str | None = None
) -> tuple[dict[str, Default], list[str]]:
    """Read the defaults of a command's options; the project's go before the user's.

    Args:
        named: the project's file, or "none": no file is read.

    Returns:
        them, by click's names for the options, and a note for each file that is not read because of its owner.

    Raises:
        UsageError: a file is no TOML, is too large, has a key that is not known, or a value of the wrong type; the file
            that is named cannot be read.
    """
    found: dict[str, Default] = {}
    notes: list[str] = []
    if named == NONE:
        return found, notes
    files = [
        _project(cwd, environ, notes) if named is None else _load(os.path.join(cwd, named)),
        _users(environ, notes),
    ]
    for file in filter(None, files):
        found = {**_of_file(file, command, options), **found}
    return found, notes


@dataclass(frozen=True)
class _File:
    path: str
    text: bytes
    owners: frozenset[int]
    """Whose it is, and whose the link that leads to it."""

    @property
    def stranger(self) -> int | None:
        """Who of them is neither the user nor root."""
        return next(iter(self.owners - {os.geteuid(), 0}), None)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that lead to ours."""
        return ("tool", "ddplaunch") if os.path.basename(self.path) == PROJECT else ()


def _project(cwd: str, environ: Mapping[str, str], notes: list[str]) -> _File | None:
    """The nearest file that is ours to read, no higher than the home folder, a repository, or this file system."""
    home = os.path.realpath(environ["HOME"]) if environ.get("HOME") else None
    device = _device(cwd)
    folder = cwd
    while True:
        found = _read_own(os.path.join(folder, PROJECT), notes)
        above = os.path.dirname(folder)
        top = folder == above or os.path.realpath(folder) == home or os.path.lexists(os.path.join(folder, ".git"))
        if found or top or _device(above) != device:
            return found
        folder = above


def _device(folder: str) -> int | None:
    """The file system that a folder is on; None where we may not look."""
    try:
        return os.stat(folder).st_dev
    except OSError:
        return None


def _users(environ: Mapping[str, str], notes: list[str]) -> _File | None:
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    return _read_own(os.path.join(config, "ddplaunch.toml"), notes) if os.path.isabs(config) else None


def _read_own(path: str, notes: list[str]) -> _File | None:
    """Read a file if it is there, and is the user's or root's; a note tells of one that is not, and speaks of us."""
    if not os.path.isfile(path):
        return None
    try:
        file = _load(path)
    except UsageError:
        if os.lstat(path).st_uid in (os.geteuid(), 0):
            raise
        return None
    if file.stranger is None:
        return file
    if b"ddplaunch" in file.text:
        whose = f"it belongs to {_name(file.stranger)}, not to you"
        notes.append(f"{path} is not read: {whose}; --config {shlex.quote(path)} reads it")
    return None


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _load(path: str) -> _File:
    """Read a file, which may be anybody's.

    Raises:
        UsageError: it cannot be read, is not a regular file, or too large.
    """
    try:
        link = os.lstat(path).st_uid
        text, owner = read_owned(path, MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UsageError(f"{path} is not a regular file", "name a file in TOML") from None
        if error.errno == errno.EFBIG:
            what = f"{path} has more than {MAX_BYTES >> 20} MiB"
            raise UsageError(what, "--config FILE names another, --config none reads none") from None
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return _File(path, text, frozenset({link, owner}))


def _of_file(read: _File, command: str, options: Sequence[click.Option]) -> dict[str, Default]:
    file, path = read.path, read.tables
    table: Any = _parse(read)
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


def _parse(file: _File) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(file.text.decode())
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file.path} is no TOML: {error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file.path} is no TOML: it is not UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise UsageError(f"{file.path} cannot be read: {error}", "--config none reads no file") from None
    return table


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
    near = nearest(key.replace("_", "-"), known)
    return f"did you mean {near}?" if near else f"its keys: {', '.join(known)}"
