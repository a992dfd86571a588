"""Reads a command line with other programs: parts separated by ``:``, as ``mpirun`` has them.

A part with ``--command`` is a program beside the ranks; the part without it has the target, and all options of the job.
The result is the command line of one ``run``, in which each program is a ``--program``: so SSH, schedulers and
manifests pass it on unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import closest_match
from ddplaunch.cli.argv_splitter import end_of_options, is_option, option_name
from ddplaunch.features.programs import job_file
from ddplaunch.features.programs.addresses import list_ports
from ddplaunch.features.programs.spec import (
    Programs,
    ProgramSpec,
    SpecReader,
    check_programs,
    encode_program,
    make_spec,
)

SEPARATOR = ":"
COMMAND = "--command"
COMMAND_OPTIONS = {
    COMMAND: False,
    "--name": True,
    "--kind": True,
    "--ready": True,
    "--ready-timeout": True,
    "--after": True,
    "--gpus": True,
    "--gpus-per-node": True,
    "--nodes": True,
    "--with": True,
    "--each-node": False,
    "--count": True,
    "--restarts": True,
    "--env": True,
    "--grace": True,
    "--nice": True,
    "--cwd": True,
    "--no-hold": False,
}
"""The options of a part with ``--command``, and whether they take a value."""

TARGET_OPTIONS = {"--name": True, "--after": True}
"""Those of them that the part with the target may have too."""

_EXAMPLE = "ddplaunch run --command vllm serve MODEL --port {port} : train.py --url http://{vllm}"


def rewrite_words(words: Sequence[str], known: Mapping[str, bool]) -> list[str]:
    """Rewrite a command line with several programs into the words of one ``run``. Raises UsageError.

    ``known``: every spelling of every option of that command, and whether it takes a value.
    """
    parts = split_parts(words, known)
    if parts is None:
        return job_file.rewrite_words(words, known)
    for part in parts:
        if not part:
            raise UsageError(f"a program is missing beside {SEPARATOR!r}".replace("'", '"'), _EXAMPLE)
    targets = [part for part in parts if not _is_command(part, known)]
    if len(targets) != 1:
        what = f"{len(targets)} parts have a target" if targets else "no part has a target: all have --command"
        raise UsageError(f"{what}", f"one part has it, the others {COMMAND}: {_EXAMPLE}")
    target, left = _read_target(targets[0], known)
    found = Programs(tuple(_read_command(part, known) for part in parts if part is not targets[0]), target)
    check_programs(found, lambda name, key: f"--{key} of {name}")
    list_ports(found, left)
    return [*map(encode_program, (*found.beside, target)), *left]


def split_parts(words: Sequence[str], known: Mapping[str, bool]) -> list[list[str]] | None:
    """Split at each ``:``, but not after a ``--`` in the part with the target; None if the target is the only part."""
    parts: list[list[str]] = [[]]
    for number, word in enumerate(words):
        if word == SEPARATOR:
            parts.append([])
            continue
        parts[-1].append(word)
        if word == "--" and not _is_command(parts[-1], known):
            parts[-1] += words[number + 1 :]
            break
    return parts if len(parts) > 1 or _is_command(parts[0], known) else None


def _is_command(part: Sequence[str], known: Mapping[str, bool]) -> bool:
    end = _end_of_options(part, {**known, **COMMAND_OPTIONS})
    return COMMAND in part[:end]


def _end_of_options(part: Sequence[str], known: Mapping[str, bool]) -> int:
    try:
        return end_of_options(part, known)
    except UsageError:  # the value of the last option is missing: reported when the part is read
        return len(part)


def _read_command(part: Sequence[str], known: Mapping[str, bool]) -> ProgramSpec:
    end = end_of_options(part, COMMAND_OPTIONS)
    command = part[end:]
    if not command or command == ["--"]:
        raise UsageError(f"{COMMAND} needs a program", _EXAMPLE)
    if is_option(command[0]):
        raise _unknown_option(option_name(command[0]), known)
    command = command[command[0] == "--" :]
    values: dict[str, Any] = {"name": os.path.basename(command[0]), "command": tuple(command)}
    reader = SpecReader(lambda key: f"--{key}")
    rest = iter(part[:end])
    for word in rest:
        name, equals, value = word.partition("=")
        if not COMMAND_OPTIONS[name]:
            if equals:
                raise UsageError(f"{name} takes no value", f"{name} alone")
            values |= {"--no-hold": {"hold": False}, "--each-node": {"each_node": True}}.get(name, {})
            continue
        value = value if equals else next(rest)
        match name:
            case "--env":
                variable, equals, value = value.partition("=")
                if not equals or not variable:
                    raise UsageError(f"--env {variable}: expected NAME=VALUE", f"--env {variable or 'NAME'}=VALUE")
                values.setdefault("env", {})[variable] = value
            case "--gpus":
                values["gpus"] = reader.text("gpus", value)
            case "--gpus-per-node":
                if not value.isdecimal():
                    raise UsageError(f"{name} {value}: expected a number of GPUs", f"{name} 4")
                values["gpus"] = int(value)
            case "--ready-timeout" | "--grace":
                values[name[2:].replace("-", "_") + "_s"] = reader.seconds(name[2:], value)
            case "--cwd" | "--with":
                values["beside" if name == "--with" else "cwd"] = reader.text(name[2:], value)
            case _:
                values[name[2:]] = getattr(reader, name[2:])(value)
    if "name" not in {option_name(word)[2:] for word in part[:end]}:
        values["name"] = _default_name(command[0])
    return make_spec(values)


def _default_name(program: str) -> str:
    """Return the name of a program without ``--name``: that of its file."""
    name = os.path.basename(program).partition(".")[0]
    try:
        return SpecReader(lambda key: f"--{key}").name(name)
    except UsageError as error:
        raise UsageError(error.message, f"give the program a name: {COMMAND} --name NAME {program}") from None


def _unknown_option(name: str, known: Mapping[str, bool]) -> UsageError:
    if near := closest_match(name, COMMAND_OPTIONS):
        return UsageError(f"no such option of {COMMAND}: {name}", f"did you mean {near}?")
    if name in known:
        return UsageError(
            f"{name} does not work with {COMMAND}", "options of the job stand in the part with the target"
        )
    return UsageError(f"no such option of {COMMAND}: {name}", f"they are {', '.join(COMMAND_OPTIONS)}")


def _read_target(part: Sequence[str], known: Mapping[str, bool]) -> tuple[ProgramSpec, list[str]]:
    """Read the part with the target: return what it sets for the ranks' program, and its other words."""
    grammar = {**known, **TARGET_OPTIONS}
    end = end_of_options(part, grammar)
    reader, left = SpecReader(lambda key: f"--{key}"), list[str]()
    spec = ProgramSpec(default_target_name(part[end:]), (), "main", is_target=True)
    rest = iter(part[:end])
    for word in rest:
        name, equals, value = word.partition("=")
        words = [word] if equals or not grammar.get(name) else [word, next(rest)]
        if name not in TARGET_OPTIONS:
            left += words
            continue
        value = value if equals else words[1]
        spec = replace(spec, **{name[2:]: reader.name(value) if name == "--name" else reader.after(value)})
    return spec, [*left, *part[end:]]


def default_target_name(words: Sequence[str]) -> str:
    """Return the name of the ranks' program: "train.py" for train.py:main, "pkg.train" for a module."""
    word = next((each for each in words if each != "--"), "")
    return os.path.basename(word).partition(":")[0] or "the target"
