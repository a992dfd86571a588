"""Reads the configuration files: default values of options of ``run``, and of commands with ``in_config``.

A project's file is the nearest pyproject.toml, in the current folder or above, with ``[tool.ddplaunch.submit]``. A
user's file is ``ddplaunch.toml`` in XDG_CONFIG_HOME (XDG Base Directory Specification), with ``[submit]``. Keys are the
names of options without the leading dashes.

For ``run`` only the project's file is read, and only for options with ``in_project``: how ranks on this machine run,
stop and are shown, but nothing that runs a command, connects to a host or names a run. Precedence: command line,
environment variables, file, cluster detection. In the user's own ``[run]`` are options with ``in_user_file``, which
their features read.

Values of these files run commands as the user (``setup``). So only files owned by the user or root are read, as git
does with ``safe.directory`` (CVE-2022-24765), and none above home or .git. ``--config FILE`` reads a file of any owner.
"""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import click
from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, Options, OptionSource
from ddplaunch.base.safe_files import read_file_and_owner, user_config_path
from ddplaunch.base.text import closest_match
from ddplaunch.cli.click_commands import COMMANDS
from ddplaunch.cli.run_options import OPTIONS
from ddplaunch.core.options import DryRun

PROJECT_FILE = "pyproject.toml"
NO_FILE = "none"  # the value of --config that reads no file
COMMAND_LINE_ONLY = ("--config", "--dry-run")  # options that have no default in a file
RUN = "run"
COMMAND_TABLES = (RUN, *(name for name, command in COMMANDS.items() if command.in_config))
USER_TABLE = RUN  # the table of the user's own file that ``ddplaunch run`` reads for itself
MAX_FILE_BYTES = 1 << 20  # a larger file is not read


class FileDefault(Struct, frozen=True):
    """A value from a file, in the form in which the option's ``read`` takes it."""

    value: str | bool | tuple[str, ...]
    file: str


class Defaults(Struct, frozen=True):
    """The defaults from all files."""

    values: Mapping[str, FileDefault]  # by the Python names of the options
    notes: tuple[str, ...] = ()  # one for each file that was not read because of its owner


def read_defaults(
    command: str, options: Sequence[click.Option], cwd: str, environ: Mapping[str, str], named: str | None = None
) -> Defaults:
    """Read the defaults of a command's options; the project's override the user's. ``named`` is the file of --config.

    Raises UsageError if a file is not TOML, is too large, has an unknown key or a value of the wrong type; or the file
    of --config cannot be read.
    """
    if named == NO_FILE:
        return Defaults({})
    untrusted: list[_UntrustedFile] = []
    values: dict[str, FileDefault] = {}
    of_user = user_config_path(environ)
    files = [
        _find_project_file(cwd, environ, untrusted) if named is None else _read_config_file(os.path.join(cwd, named)),
        _read_if_trusted(of_user, untrusted) if of_user else None,
    ]
    known = {
        option.opts[-1].removeprefix("--"): option for option in options if option.opts[-1] not in COMMAND_LINE_ONLY
    }
    for file in filter(None, files):
        table = _command_tables(file).get(command, {})
        values = {**dict(_read_table(file, command, table, known, _make_owner_hint(command, file))), **values}
    notes = tuple(f"{each.note}; to read it: --config {shlex.join([each.path])}" for each in untrusted)
    return Defaults(values, notes)


def _read_run_defaults(
    known: Mapping[str, Option], all_options: Mapping[str, Option], cwd: str, environ: Mapping[str, str]
) -> Defaults:
    """Read the project's defaults of ``run``; ``known`` has the options that a project may set, by key.

    Raises UsageError as ``read_defaults`` does.
    """
    untrusted: list[_UntrustedFile] = []
    file = _find_project_file(cwd, environ, untrusted)
    notes = tuple(each.note for each in untrusted)
    if file is None or b"ddplaunch" not in file.text:
        return Defaults({}, notes)

    def hint_for(key: str) -> str | None:
        option = all_options.get(key)
        if option and option.in_user_file:
            return f"[{USER_TABLE}] {key} goes into your own ddplaunch.toml, in $XDG_CONFIG_HOME or ~/.config"
        if option:
            return f"a project's file cannot set it: use --{key}"
        return _make_owner_hint(RUN, file)(key)

    return Defaults(dict(_read_table(file, RUN, _command_tables(file).get(RUN, {}), known, hint_for)), notes)


def with_project_defaults(options: Options, cwd: str, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
    """Fill in options that the user has not set, from the project's file; return the options, and notes on the file.

    Raises UsageError if the file is not TOML, or has an unknown key or an invalid value.
    """
    if options[DryRun].no_config:
        return options, ()
    known = {option.opts[-1][2:]: option for option in OPTIONS if not option.is_argument}
    defaults = _read_run_defaults(
        {key: option for key, option in known.items() if option.in_project}, known, cwd, environ
    )
    new: dict[str, Any] = {}
    used: list[str] = []
    for name, default in defaults.values.items():
        if options.sources[name] is OptionSource.DEFAULT:
            option = next(each for each in OPTIONS if each.name == name)
            new[name] = _parse_option_value(option, default.value, default.file)
            if name == "log_dir" and os.path.dirname(default.file) != cwd:  # relative to the file
                new[name] = os.path.join(os.path.dirname(default.file), new[name])
            used += option.to_argv(new[name])
    if not new:
        return options, defaults.notes
    file = next(iter(defaults.values.values())).file
    note = (f"defaults of {file}: {' '.join(used)}",) if used else ()
    return options.with_values(OptionSource.FILE, new), (*defaults.notes, *note)


def _parse_option_value(option: Option, value: str | bool | tuple[str, ...], file: str) -> Any:
    place = f"{file}: [tool.ddplaunch.run] {option.opts[-1][2:]}"
    if option.choices and value not in option.choices:
        raise UsageError(f'{place} = "{value}": expected {" or ".join(option.choices)}')
    try:
        return option.read(option, value) if option.read else value
    except UsageError as error:
        _, _, expected = error.message.partition(": ")
        raise UsageError(f'{place} = "{value}": {expected or error.message}', error.hint) from None


def read_user_table(path: str, name: str) -> dict[str, Any]:
    """Return one table of the user's own file, {} if there is none.

    Raises UsageError if the file is not TOML, or the name is not that of a table.
    """
    file = _read_if_trusted(path, [])
    if file is None or name.encode() not in file.text:
        return {}
    table: Any = _parse(file).get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {file.heading(name)} is not a table")
    return table


class _ConfigFile(Struct, frozen=True):
    path: str
    text: bytes
    owners: frozenset[int]  # uids of the owners of the file, and of the symbolic link that leads to it

    @property
    def untrusted_owner(self) -> int | None:
        """The uid of an owner of the file who is neither this user nor root; None if there is none."""
        return next(iter(self.owners - {os.geteuid(), 0}), None)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the enclosing TOML tables: ("tool", "ddplaunch") in a pyproject.toml, else ()."""
        return ("tool", "ddplaunch") if os.path.basename(self.path) == PROJECT_FILE else ()

    def heading(self, command: str) -> str:
        return f"[{'.'.join((*self.tables, command))}]"


class _UntrustedFile(Struct, frozen=True):
    """A configuration file that was ignored because another user owns it."""

    path: str
    note: str


def _find_project_file(cwd: str, environ: Mapping[str, str], untrusted: list[_UntrustedFile]) -> _ConfigFile | None:
    """Return the nearest trusted file, searching up to the home folder, the repository or the file system's root."""
    home = os.path.realpath(environ["HOME"]) if environ.get("HOME") else None
    device = _device_number(cwd)
    folder = cwd
    while True:
        file = _read_if_trusted(os.path.join(folder, PROJECT_FILE), untrusted)
        above = os.path.dirname(folder)
        top = folder == above or os.path.realpath(folder) == home or os.path.lexists(os.path.join(folder, ".git"))
        if file or top or _device_number(above) != device:
            return file
        folder = above


def _device_number(folder: str) -> int | None:
    """Return the device number of a folder, None if it cannot be accessed."""
    try:
        return os.stat(folder).st_dev
    except OSError:
        return None


def _read_if_trusted(path: str, untrusted: list[_UntrustedFile]) -> _ConfigFile | None:
    """Read a file that the user or root owns; add another owner's file that mentions ddplaunch to ``untrusted``."""
    if not os.path.isfile(path):
        return None
    try:
        file = _read_config_file(path)
    except UsageError:
        if os.lstat(path).st_uid in (os.geteuid(), 0):
            raise
        return None
    if file.untrusted_owner is None:
        return file
    if b"ddplaunch" in file.text:
        whose = f"it belongs to {_user_name(file.untrusted_owner)}, not to you"
        untrusted.append(_UntrustedFile(path, f"{path} was not read: {whose}"))
    return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _read_config_file(path: str) -> _ConfigFile:
    """Read a file of any owner. Raises UsageError if it cannot be read, is not a regular file, or is too large."""
    try:
        link = os.lstat(path).st_uid
        text, owner = read_file_and_owner(path, MAX_FILE_BYTES)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UsageError(f"{path} is not a regular file", "--config needs a file in TOML") from None
        if error.errno == errno.EFBIG:
            what = f"{path} has more than {MAX_FILE_BYTES >> 20} MiB"
            raise UsageError(what, "--config FILE reads another file, --config none reads no file") from None
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return _ConfigFile(path, text, frozenset({link, owner}))


def _command_tables(file: _ConfigFile) -> dict[str, dict[str, Any]]:
    """Return ddplaunch's tables in a file, by command."""
    tables: Any = _parse(file)
    for name in file.tables:
        tables = tables.get(name, {})
        if not isinstance(tables, dict):
            raise UsageError(f"{file.path}: {'.'.join(file.tables)} is not a table")
    for name, table in tables.items():
        if name not in COMMAND_TABLES:
            known = ", ".join(map(file.heading, COMMAND_TABLES))
            raise UsageError(f"{file.path}: unknown table {file.heading(name)}", f"ddplaunch reads {known}")
        if not isinstance(table, dict):
            raise UsageError(f"{file.path}: {file.heading(name)} is not a table")
    return {name: table for name, table in tables.items() if file.tables or name != USER_TABLE}


def _read_table(
    file: _ConfigFile,
    command: str,
    table: Mapping[str, Any],
    known: Mapping[str, click.Option] | Mapping[str, Option],
    hint_for: Callable[[str], str | None],
) -> Iterator[tuple[str, FileDefault]]:
    heading = file.heading(command)
    for key, value in table.items():
        if key not in known:
            near = closest_match(key.replace("_", "-"), known)
            hint = hint_for(key) or (f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}")
            raise UsageError(f"{file.path}: unknown key {key} in {heading}", hint)
        option = known[key]
        yield option.name or "", FileDefault(_to_option_text(value, option, f"{file.path}: {heading} {key}"), file.path)


def _parse(file: _ConfigFile) -> dict[str, Any]:
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # 2 ms that few starts need
    try:
        table: dict[str, Any] = toml.loads(file.text.decode())
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{file.path}: TOML syntax error: {error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file.path} is not UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deeply nested brackets
        raise UsageError(f"{file.path} cannot be read: {error}", "--config none reads no file") from None
    return table


def _to_option_text(value: object, option: click.Option | Option, place: str) -> str | bool | tuple[str, ...]:
    """Convert a value to its form on a command line."""
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise UsageError(f"{place} = {value!r}: expected true or false")
    if option.multiple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise UsageError(f"{place} = {value!r}: expected a list of strings", f'{option.opts[-1][2:]} = ["…", "…"]')
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise UsageError(f"{place} = {value!r}: expected a string or a number")


def _make_owner_hint(command: str, file: _ConfigFile) -> Callable[[str], str | None]:
    """Return a function that says to which other command's table a key belongs; it returns None if to none."""

    def owner_hint(key: str) -> str | None:
        for other in COMMAND_TABLES:
            if other in (command, RUN):
                continue
            headings = import_module(COMMANDS[other].module).HEADINGS
            if any(f"--{key}" in option.opts for options in headings.values() for option in options):
                return f"it belongs in {file.heading(other)}, the defaults of ddplaunch {other}"
        return None

    return owner_hint
