"""Parsers of option values, and the inverse: values back to text."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Callable
from typing import Any

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.options import TIME_UNITS, Option, Read
from ddplaunch.base.text import closest_match, join_names, signal_name
from ddplaunch.base.types import WEEK_S
from ddplaunch.core.prefix import check_template as check_prefix
from ddplaunch.system.plan.numbers import parse_float, parse_int

AUTO = "auto"
"""The value of --node-rank with which node 0 assigns the node rank."""

PREEMPT_SIGNALS = ("USR1", "USR2", "TERM", "HUP", "XCPU")
"""Possible preemption signals: configurable in Slurm and LSF, USR1 and USR2 in SGE, TERM in Kubernetes."""

MAX_NAME = 100  # characters; names of folders are made of it
UNBOUNDED = float("inf")


def make_number_parser(parse: Callable[[str], float | None], lowest: float, highest: float, expected: str) -> Read:
    """Return a parser of numbers from ``lowest`` to ``highest``; errors say that ``expected`` was expected."""

    def parse_number(option: Option, text: str | None) -> Any:
        if text is None:
            return None
        value = parse(text)
        if value is None or not lowest <= value <= highest:
            raise UsageError(f"{option.opts[-1]} {text}: expected {expected}")
        return value

    return parse_number


integer = make_number_parser(parse_int, -UNBOUNDED, UNBOUNDED, "a whole number")
UNITS = TIME_UNITS


def parse_seconds(text: str) -> float | None:
    """Parse a time, "90", "2.5", or with a unit "90s", "10m", "2h", "1d"; None if it is not one."""
    value = parse_float(text[:-1] if text[-1:] in UNITS else text)
    return None if value is None else value * UNITS.get(text[-1:], 1)


seconds = make_number_parser(parse_seconds, 0, WEEK_S, "a time from 0 up to a week, like 2.5 (seconds), 10m or 2h")
time_limit = make_number_parser(
    parse_seconds, 1, 52 * WEEK_S, "a time from 1 second up to a year, like 90 (seconds), 10m or 2h"
)


def parse_nnodes(option: Option, text: str) -> tuple[int, int]:
    """Parse --nnodes: "4", or "2:4" for any number from 2 to 4."""
    lowest, colon, highest = text.partition(":")
    first, last = parse_int(lowest), parse_int(highest if colon else lowest)
    if first is None or last is None:
        raise UsageError(f"--nnodes {text}: expected a number like 2, or a range like 2:4")
    if first > last:
        raise UsageError(f"--nnodes {text}: {first} is more than {last}", f"--nnodes {last}:{first}")
    if first < 1 and colon:
        raise UsageError(f"--nnodes {text}: a job has at least one node", f"--nnodes 1:{highest}")
    return first, last


def format_nnodes(nnodes: tuple[int, int]) -> str:
    """Format the value of --nnodes as text, the inverse of ``parse_nnodes``: "4" or "2:4"."""
    return ":".join(map(str, dict.fromkeys(nnodes)))


def parse_node_rank(option: Option, text: str | None) -> int | str | None:
    """Parse --node-rank: a number, or "auto"."""
    return AUTO if text == AUTO else integer(option, text)


def parse_name(option: Option, text: str | None) -> str | None:
    """Check a name that becomes a part of folder names."""
    if text is not None and (len(text) > MAX_NAME or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text)):
        raise UsageError(f"{option.opts[-1]} {text}: expected letters, digits, dots, dashes and underscores")
    return text


def parse_run_name(option: Option, text: str | None) -> str | None:
    """Check the name of a run, which commands must not take for the number of a job or process."""
    if text is not None and text.isdecimal():
        raise UsageError(
            f"{option.opts[-1]} {text}: a number is that of a job or a process", f"{option.opts[-1]} run-{text}"
        )
    return parse_name(option, text)


RESTART_WORDS = ("any", "transient", "always")


def parse_restart_on(option: Option, text: str) -> str:
    """Check a list of causes of a restart: exit codes as a shell shows them, or words of ``RESTART_WORDS``."""
    words = [word.strip().lstrip("0") or word for word in text.split(",")]
    for word in words:
        code = parse_int(word)
        if code == 0:
            raise UsageError(f"{option.opts[-1]} {text}: a rank that exits with code 0 has not failed")
        if code is not None and not 0 < code < 256:
            hint = f"{128 - code} is the exit code of {signal_name(-code)}" if -65 < code < 0 else None
            raise UsageError(f"{option.opts[-1]} {text}: {code} is no exit code: they are 1 to 255", hint)
        if code is None and word not in RESTART_WORDS:
            near = closest_match(word, RESTART_WORDS)
            what = f"{option.opts[-1]} {sanitize_line(text, 60)}: expected {', '.join(RESTART_WORDS)} or exit codes"
            raise UsageError(what, f"did you mean {near}?" if near else f"{option.opts[-1]} 75,137,transient")
        if words.count(word) > 1:
            raise UsageError(f"{option.opts[-1]} {text}: {word} is listed twice", "leave one of them out")
    if len(words) > 1 and (whole := next((word for word in words if word in ("any", "always")), None)):
        others = [word for word in words if word != whole]
        what = f"{option.opts[-1]} {text}: {whole} includes {join_names(others)}"
        raise UsageError(what, f"{option.opts[-1]} {whole}, or {option.opts[-1]} {','.join(others)}")
    return ",".join(words)


def parse_prefix(option: Option, text: str) -> str:
    """Check the template of --prefix."""
    if text != option.default:
        check_prefix(text)
    return text


def parse_signal(option: Option, text: str | None) -> int | None:
    """Parse the name of a preemption signal."""
    if text is None or (text == "none" and option.name == "preempt_signal"):
        return None
    name = text.upper().removeprefix("SIG")
    if name not in PREEMPT_SIGNALS:
        raise UsageError(f"{option.opts[-1]} {text}: expected one of {', '.join(PREEMPT_SIGNALS)}")
    return signal.Signals[f"SIG{name}"].value


def format_signal(number: int | None) -> str:
    """Format a preemption signal as text, the inverse of ``parse_signal``: "USR1" or "none"."""
    return "none" if number is None else signal.Signals(number).name.removeprefix("SIG")


def check_commands(option: Option, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check command lines for syntax errors on every node, although only node 0 uses them."""
    for text in texts:
        split_command(text, option.opts[-1])
    return texts


def split_command(text: str, option: str) -> list[str]:
    """Split a command line like a shell. Raises UsageError if it is empty or a quote is not closed."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {str(error).lower()}", "quotes must come in pairs") from None
    if not words or not words[0]:
        raise UsageError(f"{option} {text!r}: expected a program", f"{option} 'PROGRAM ARGUMENTS'")
    return words


def find_program(text: str, option: str, *, is_remote: bool) -> tuple[tuple[str, ...], str]:
    """Split a command line, and find the path of its program; ``is_remote``: it is elsewhere, so not checked."""
    words = split_command(text, option)
    path = shutil.which(words[0])
    if path is None and not is_remote:
        hint = f"name one on PATH, or ./NAME; for a shell: {option} \"sh -c '…'\""
        raise UsageError(f"{option} {text}: program {words[0]} not found", hint)
    return tuple(words), path or words[0]
