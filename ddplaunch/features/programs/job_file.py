"""Reads a job file: TOML with a table ``[programs.NAME]`` for each program; one of them has the target."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.base.text import closest_match
from ddplaunch.cli.argv_splitter import TRAILING_OPTIONS, end_of_options
from ddplaunch.features.programs.addresses import list_ports
from ddplaunch.features.programs.spec import (
    Programs,
    ProgramSpec,
    SpecReader,
    check_programs,
    encode_program,
    make_spec,
)

SUFFIX = ".toml"
MAX_FILE_BYTES = 1 << 20
_TABLE = "programs"
_KEYS_OF_BOTH = ("kind", "gpus", "nodes", "after", "env")
_KEYS_OF_COMMANDS = ("ready", "ready-timeout", "grace", "nice", "cwd", "hold", "restarts", "count", "with", "each-node")
KEYS = ("command", "target", *_KEYS_OF_BOTH, *_KEYS_OF_COMMANDS)


def rewrite_words(words: Sequence[str], known: Mapping[str, bool]) -> list[str]:
    """Rewrite a command line whose target is a job file into the words of one ``run``. Raises UsageError."""
    try:
        end = end_of_options(words, known)
    except UsageError:  # the value of the last option is missing, which is reported later
        return [*words]
    if end == len(words) or not words[end].endswith(SUFFIX) or {"-m", "--module", "--no-python"} & {*words[:end]}:
        return [*words]
    path, rest = words[end], words[end + 1 :]
    trailing = end_of_options(rest, {name: known[name] for name in TRAILING_OPTIONS & known.keys()})
    if trailing < len(rest):
        what = f"{path} takes no arguments: {sanitize_line(rest[trailing], 60)}"
        raise UsageError(what, 'write those of the program into the file: target = "train.py --lr 0.1"')
    programs, target = JobFile(path).read()
    own = _add_double_dash(target, known, path, programs.target.name)
    worlds = [
        replace(each, command=(*_add_double_dash(each.command, known, path, each.name),)) if each.is_world else each
        for each in programs.beside
    ]
    return [*map(encode_program, (*worlds, programs.target)), *words[:end], *rest, *own]


def _add_double_dash(words: Sequence[str], known: Mapping[str, bool], path: str, name: str) -> list[str]:
    """Return the words of a target, with ``--`` before its arguments if one of them is ``:``. Raises UsageError."""
    end = end_of_options(words, known)
    if end == len(words):
        raise UsageError(f"{path}: programs.{name}.target has no target", 'target = "train.py"')
    options, program = words[:end], words[end:]
    return [*options, program[0], "--", *program[1:]] if ":" in program else [*words]


class JobFile:
    """A job file (TOML), which describes the programs of a job."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises UsageError if that fails."""
        self._path = path
        try:
            self._text = read_regular_file(path, MAX_FILE_BYTES).decode()
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not UTF-8") from None
        except OSError as error:
            what = "is too large for a job file" if error.errno == errno.EFBIG else error.strerror
            raise UsageError(f"{path}: {what}", "name a job file, or put -- before a script of that name") from None

    def read(self) -> tuple[Programs, list[str]]:
        """Return the programs, and the words of the target."""
        table = self._parse()
        if other := next((key for key in table if key != _TABLE), None):
            what = f"{self._path}:{self._find_line((), other)}: no such table: {other}"
            raise UsageError(what, f"a job file has tables [{_TABLE}.NAME]")
        tables = table.get(_TABLE)
        if not isinstance(tables, dict) or not tables:
            raise UsageError(f"{self._path} has no programs", f"a job file has tables [{_TABLE}.NAME]")
        beside: list[ProgramSpec] = []
        own: tuple[ProgramSpec, list[str]] | None = None
        for name, values in tables.items():
            if not isinstance(values, dict):
                raise UsageError(f"{self._place(name, '')}: expected a table", f"[{_TABLE}.{name}]")
            self._check_keys(name, values)
            if "target" not in values:
                beside.append(self._read_command(name, values))
            elif own is None and values.get("kind", "main") == "main":
                own = self._read_target(name, values), self._read_words(name, "target", values["target"])
            else:  # with ranks of its own
                beside.append(self._read_program_with_ranks(name, values))
        if own is None:
            why = "no target is a main" if any(each.is_world for each in beside) else "no program has a target"
            raise UsageError(f"{self._path}: {why}", 'the ranks of the job have one: target = "train.py"')
        target, words = own
        programs = Programs(tuple(beside), target)
        check_programs(programs, self._place)
        list_ports(programs, words)
        return programs, words

    def _parse(self) -> dict[str, Any]:
        toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            table: dict[str, Any] = toml.loads(self._text)
        except toml.TOMLDecodeError as error:
            raise UsageError(f"{self._path}: TOML syntax error: {error}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, deeply nested brackets
            raise UsageError(f"{self._path} cannot be read: {error}") from None
        return table

    def _place(self, name: str, key: str) -> str:
        """Return the place of a key for a message: "rl.toml:3: programs.vllm.kind"."""
        line = self._find_line((_TABLE, name), key)
        return f"{self._path}:{line}: " + ".".join(filter(None, (_TABLE, name, key)))

    def _find_line(self, table: Sequence[str], key: str) -> int:
        """Return the line of a key, else that of its table; dotted keys and inline tables are not looked into."""
        lines = self._text.splitlines()
        names = (rf"[\"']?{re.escape(part)}[\"']?" for part in table)
        header = re.compile(r"\s*\[\s*" + r"\s*\.\s*".join(names) + r"\s*\]")
        start = next((n for n, line in enumerate(lines) if table and header.match(line)), -1)
        pattern = re.compile(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
        for number in range(start + 1, len(lines)):
            if key and pattern.match(lines[number]):
                return number + 1
            if table and lines[number].lstrip().startswith("["):
                break
        return max(start, 0) + 1

    def _check_keys(self, name: str, values: Mapping[str, object]) -> None:
        """Raise UsageError if a program has unknown keys, or not exactly one of command and target."""
        if unknown := next((key for key in values if key not in KEYS), None):
            near = closest_match(unknown.replace("_", "-"), KEYS)
            hint = f"did you mean {near}?" if near else f"keys are {', '.join(KEYS)}"
            raise UsageError(f"{self._place(name, unknown)}: no such key", hint)
        kinds = [key for key in ("command", "target") if key in values]
        if len(kinds) != 1:
            what = "it has a command and a target" if kinds else "it has no command and no target"
            raise UsageError(f"{self._place(name, '')}: {what}", 'command = "vllm serve …", or target = "train.py"')

    def _read_words(self, name: str, key: str, value: object) -> list[str]:
        """Return the words of a command: a text is split as a shell does, a list has the words."""
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            words = [str(each) for each in value]
        elif isinstance(value, str):
            try:
                words = shlex.split(value)
            except ValueError as error:
                what = f"{self._place(name, key)}: {str(error).lower()}"
                raise UsageError(what, "quotes must come in pairs") from None
        else:
            raise UsageError(f"{self._place(name, key)}: expected a text, or a list of words")
        if not words or not words[0] or any("\0" in word for word in words):
            raise UsageError(f"{self._place(name, key)}: expected a program", f'{key} = "PROGRAM ARGUMENTS"')
        return words

    def _read_values(self, name: str, values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        reader = SpecReader(lambda key: self._place(name, "" if key == "name" else key))
        read_values: dict[str, Any] = {"name": reader.name(name)}
        for key in keys:
            if key not in values:
                continue
            match key:
                case "ready-timeout" | "grace":
                    read_values[key.replace("-", "_") + "_s"] = reader.seconds(key, values[key])
                case "cwd" | "with":
                    read_values["beside" if key == "with" else key] = reader.text(key, values[key])
                case "hold" | "each-node":
                    read_values[key.replace("-", "_")] = reader.flag(key, values[key])
                case _:
                    read_values[key] = getattr(reader, key)(values[key])
        return read_values

    def _read_command(self, name: str, values: Mapping[str, Any]) -> ProgramSpec:
        found = self._read_values(name, values, (*_KEYS_OF_BOTH, *_KEYS_OF_COMMANDS))
        return make_spec({**found, "command": tuple(self._read_words(name, "command", values["command"]))})

    def _read_program_with_ranks(self, name: str, values: Mapping[str, Any]) -> ProgramSpec:
        found = self._read_values(name, values, (*_KEYS_OF_BOTH, *_KEYS_OF_COMMANDS))
        words = tuple(self._read_words(name, "target", values["target"]))
        return make_spec({"kind": "main", **found, "command": words, "is_world": True})

    def _read_target(self, name: str, values: Mapping[str, Any]) -> ProgramSpec:
        if wrong := next((key for key in _KEYS_OF_COMMANDS if key in values), None):
            what = f"{self._place(name, wrong)}: the job's own ranks do not have that"
            raise UsageError(what, "leave it out")
        spec = ProgramSpec(**{"kind": "main", **self._read_values(name, values, _KEYS_OF_BOTH), "command": ()})
        return replace(spec, is_target=True)
