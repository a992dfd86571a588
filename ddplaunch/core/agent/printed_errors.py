"""Finds errors in what a rank has printed: exceptions that ended its threads, and why native code has aborted it."""

from __future__ import annotations

import re

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import sanitize_line, sanitize_text
from ddplaunch.base.stack_frames import FRAME_LINE, Frame, parse_frame_line, parse_traceback
from ddplaunch.core.failures import MAX_HEADLINE_CHARS

_THREAD_ERROR = r"Exception in thread (.+?):\r?\n(Traceback \(most recent call last\):\n(?:[ \t].*\n)*.+)"
"""What ``threading.excepthook`` prints; with the last line of the traceback."""

_MAX_SEARCHED_BYTES = 1 << 16

_WHAT = r"(?m)^\s*what\(\): +(\S.*)$"
"""The message of an uncaught C++ exception, as std::terminate prints it."""

_ENFORCE = r"^\[enforce fail at [^\]]*\] (?:.*? vs \S+\. )?"
"""The beginning of gloo's and c10's messages: a place in their source, and a condition."""

_C_ERROR = (
    r"(?m)^(?:.*: Assertion .+ failed\.|(?:free|malloc|munmap_chunk|realloc|calloc)\(\): .+|double free or corruption.*"
    r"|corrupted .+|\*\*\* .+ \*\*\*: .+)$"
)
"""What glibc prints before it aborts a process."""


def add_abort_location(hint: str | None, printed: bytes, folder: str) -> str | None:
    """Add to a hint where the program was when native code has aborted it: "it was in all_reduce, step at train.py:9".

    faulthandler has printed the stacks of all threads. If no stack is in torch.distributed, the hint is returned
    unchanged. If the hint names the collective already, as "it was in all_reduce #7", only the line is added.
    """
    begin = printed.rfind(b"Fatal Python error: ")
    stacks: list[list[Frame]] = [[]]
    for line in printed[begin:].decode(errors="replace").split("\n") if begin >= 0 else ():
        if found := FRAME_LINE.match(line):
            stacks[-1].append(parse_frame_line(found, folder, PACKAGE_DIR))
        elif line.endswith("(most recent call first):"):
            stacks.append([])
    for frames in stacks:
        inside = [frame.function for frame in frames if frame.file.endswith(_C10D)]
        own = next((frame for frame in frames if frame.own), None)
        if inside and own:
            place = f"{own.file}:{own.line}"
            location = place if own.function == "<module>" else f"{own.function} at {place}"
            first, *more = (hint or "").split("\n")
            if not f"{first} ".startswith(f"it was in {inside[-1]} "):
                first, more = f"it was in {inside[-1]}", [hint] if hint else []
            return "\n".join([first if place in first else f"{first}, {location}", *more])
    return hint


_C10D = "torch/distributed/distributed_c10d.py"
_TRACEBACK = r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+([A-Za-z_][\w.]*(?:: .*)?)\s*\Z"
_RANK_PREFIX = r"(?m)^\[rank\d+\]: ?"


def find_last_traceback(printed: bytes) -> tuple[str, str] | None:
    """Return message and traceback of the exception with which the output ends; None if it ends otherwise.

    Needed where a rank could not record it: the rank may not write into the job's folder, or is no Python program.
    """
    begin = printed.rfind(b"Traceback (most recent call last):")
    text = re.sub(_RANK_PREFIX, "", printed[begin:].decode(errors="replace")) if begin >= 0 else ""
    found = re.match(_TRACEBACK, text.replace("\r", ""))
    return (sanitize_text(found[1]), sanitize_text(found[0].rstrip())) if found else None


def describe_thread_error(printed: bytes, folder: str) -> str | None:
    """Describe the last exception that ended a thread: "its thread prefetch had failed: OSError: … (train.py:9)"."""
    begin = printed.rfind(b"Exception in thread ")
    found = re.match(_THREAD_ERROR, printed[begin:].decode(errors="replace")) if begin >= 0 else None
    if found is None:
        return None
    name, traceback = found[1], found[2]
    message = sanitize_line(traceback.rpartition("\n")[2], MAX_HEADLINE_CHARS)
    own = next((frame for frame in parse_traceback(traceback, folder) if frame.own), None)
    where = f" ({own.function} at {own.file}:{own.line})" if own else ""
    return f"its thread {sanitize_line(name, 80)} had failed: {message}{where}"


def find_abort_reason(printed: bytes) -> str | None:
    """Return the message that native code printed before it ended the process; None if there is none."""
    begin = printed.rfind(b"terminate called")
    text = printed[begin if begin >= 0 else -_MAX_SEARCHED_BYTES :].decode(errors="replace")
    if begin >= 0 and (found := re.search(_WHAT, text)):
        return sanitize_line(re.sub(_ENFORCE, "", found[1]), MAX_HEADLINE_CHARS)
    lines = re.findall(_C_ERROR, text)
    return sanitize_line(lines[-1], MAX_HEADLINE_CHARS) if lines else None
