"""Reads what a rank that ended has left: its error file and its last lines of output."""

from __future__ import annotations

import json
import os
import re

from msgspec.structs import replace

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import MAX_LINE_CHARS, MAX_TAIL_LINES, sanitize_line, sanitize_text
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.core.failures import RankFailure
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS

MAX_ERROR_FILE_BYTES = 16 << 20  # a larger error file is ignored; the file has the message twice


def read_exception(path: str | None, failure: RankFailure, *, stopped: bool = False) -> RankFailure | None:
    """Return the failure with the exception in the rank's error file.

    None if the file is missing or truncated, or if the rank was ``stopped`` and only a KeyboardInterrupt is in it.
    """
    if (recorded := _read_error_file(path)) is None:
        return None
    message, info = recorded
    if stopped and info.get("interrupt"):
        return None
    time_ns, refused, callstack = info.get("time_ns"), info.get("refused"), info.get("py_callstack")
    entered = info.get("collectives")
    return replace(
        failure,
        message=message,
        traceback=sanitize_text(callstack) if isinstance(callstack, str) and callstack else None,
        moment=time_ns / 1e9 if isinstance(time_ns, int) and 0 < time_ns < 1 << 64 else failure.moment,
        refused=(message, _parse_hint(refused.get("hint"))) if isinstance(refused, dict) else None,
        collectives=entered if isinstance(entered, int) and 0 < entered < 1 << 62 else None,
        hint=_parse_hint(info.get("hint")),
    )


def read_exception_message(path: str | None) -> str | None:
    """Return the message of the exception in a rank's error file; None if the file is missing or truncated."""
    recorded = _read_error_file(path)
    return recorded[0] if recorded else None


def _read_error_file(path: str | None) -> tuple[str, dict[str, object]] | None:
    """Read message and details from an error file, leniently: a program may have written values of any type.

    Source: torch.distributed.elastic.multiprocessing.errors writes {"message": {"message", "extraInfo":
    {"py_callstack", "timestamp"}}}, or {"message": text}; so does ddplaunch, with more in "extraInfo".
    """
    if path is None:
        return None
    try:
        content = json.loads(read_regular_file(path, MAX_ERROR_FILE_BYTES, follow_symlinks=False))["message"]
        if not isinstance(content, dict):
            return sanitize_text(str(content)), {}
        message = sanitize_text(str(content.get("message")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # RecursionError: deep nesting
        return None
    info = content.get("extraInfo")
    # torch's @record writes "ValueError: " for an exception without a message.
    return message.removesuffix(": "), info if isinstance(info, dict) else {}


def _parse_hint(text: object) -> str | None:
    if not isinstance(text, str):
        return None
    return "\n".join(sanitize_line(line, MAX_LINE_CHARS) for line in text.splitlines()[:2])


def signal_hint(number: int | None) -> str | None:
    """Explain an end by this signal; None if there is nothing to add."""
    if number in FORWARDED_SIGNALS:
        return "the program does not handle this signal, and Slurm's --signal may come to every process of a step"
    return None


def last_lines(tail: bytes, count: int = MAX_TAIL_LINES) -> tuple[str, ...]:
    """The last lines that a rank printed; of a progress bar, its last state.

    Frames of native code are omitted if there are other lines. If they follow a Python traceback, the lines end with
    the traceback, or soon after it. The innermost frames of the stack that faulthandler prints after a fatal error are
    shown.
    """
    printed = [line.rstrip("\r").rpartition("\r")[2] for line in tail.decode(errors="replace").split("\n")]
    printed = [line for line in printed if line.strip() and not line.startswith(_INTERNAL_LINE_PREFIXES)]
    lines = [line for line in printed if not _NATIVE_FRAME.match(line)] or printed
    begins = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if begins and any(map(_NATIVE_FRAME.match, printed[begins[-1] :])):
        first = begins[-1]
        exception = next((n for n in range(first + 1, len(lines)) if not _INDENTED.match(lines[n])), len(lines))
        lines = lines[: max(exception + 1, first + count)]
    if fatal := [number for number, line in enumerate(lines) if line.startswith(_FATAL)]:  # a stack follows it
        lines = lines[: max(fatal[-1] - _LINES_BEFORE_FATAL, 0) + count]
    return tuple(sanitize_line(line, MAX_LINE_CHARS) for line in lines[-count:])


_NATIVE_FRAME = re.compile(
    r"(\[\S+\] *)?\s*(frame #\d+: |#\d+:? +(0x[0-9a-f]|\S+ \(.*\) (at|from) )|@ +0x[0-9a-f])"
    r"|\[\S+\] \[ *\d+\] \S|\S+ ?\(\S*\+0x[0-9a-f]+\)"
)
"""A line of a stack of native code: of torch, gdb and sanitizers, glog, Open MPI, and glibc's ``backtrace``."""

_FATAL, _LINES_BEFORE_FATAL = "Fatal Python error: ", 3

_TRACEBACK = re.compile(r"(\[rank\d+\]: ?)?Traceback \(most recent call last\):$")
_INDENTED = re.compile(r"(\[rank\d+\]: ?)?\s")
_INTERNAL_LINE_PREFIXES = (
    f'  File "{PACKAGE_DIR}{os.sep}',
    "Extension modules:",
)
"""Lines of faulthandler that do not concern the user: ddplaunch's own frames, and a list of libraries."""
