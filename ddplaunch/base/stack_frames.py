"""Frames of Python stacks, parsed from text: tracebacks of exceptions, and the lines of faulthandler dumps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from msgspec import Struct

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.types import Number, TextLine

MAX_FRAMES = 100  # of one stack

FRAME_LINE = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d{1,9}|\?\?\?),? in (.*)$')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+t?/|^<|^\?\?\?$")
"""Files that are not the user's: of packages, the standard library, and code without a file ("<frozen runpy>")."""

_MODULE_START = re.compile(r"^<frozen (?:runpy|importlib)|/lib(?:64)?/python3\.\d+t?/(?:runpy|importlib/__init__)\.py$")
"""Files whose frames call a program that was started by its module name (runpy)."""


class Frame(Struct, frozen=True):
    """One call in a stack."""

    function: TextLine
    file: TextLine  # relative to the job's folder if it is below
    line: Number
    own: bool  # user code, not from the standard library or an installed package


def parse_traceback(traceback: str, folder: str, package: str = PACKAGE_DIR) -> tuple[Frame, ...]:
    """Parse the frames of the last traceback that Python printed for an exception, the innermost first."""
    frames: list[Frame] = []
    for line in traceback.split("\n"):
        if line.startswith("Traceback (most recent call last):"):
            frames = []  # before it came the traceback of the exception's cause
        elif found := FRAME_LINE.match(line):
            frames.append(parse_frame_line(found, folder, package))
    return strip_internal_frames(frames[::-1][:MAX_FRAMES], package)


def parse_frame_line(found: re.Match[str], folder: str, package: str) -> Frame:
    """Return the frame of a line that matches ``FRAME_LINE``."""
    line = int(found[2]) if found[2].isdigit() else 0
    return make_frame(unescape(found[3]), unescape(found[1] or "???"), line, folder, package)


def make_frame(function: str, path: str, line: int, folder: str, package: str = PACKAGE_DIR) -> Frame:
    """Create a frame; a path below ``folder`` becomes relative, and ``own`` states whether it is user code."""
    is_internal = path.startswith(os.path.join(package, ""))
    own = not is_internal and not _INSTALLED.search(path)
    below = os.path.join(folder, "")
    if not is_internal and below != "/" and path.startswith(below):
        path = path[len(below) :]
    return Frame(function, path, line, own)


def is_internal_file(path: str, package: str = PACKAGE_DIR) -> bool:
    """Whether a file is part of ddplaunch that runs in ranks: it is in a folder ``rank`` of the package."""
    return path.startswith(os.path.join(package, "")) and "/rank/" in path[len(package) :]


def strip_internal_frames(frames: Iterable[Frame], package: str) -> tuple[Frame, ...]:
    """Remove the frames of ddplaunch's own files from a stack, and the outermost frames of runpy."""
    stripped = [frame for frame in frames if not is_internal_file(frame.file, package)]
    while stripped and is_module_start(stripped[-1]):
        stripped.pop()
    return tuple(stripped)


def is_module_start(frame: Frame) -> bool:
    """Whether this frame calls a program that was started by its module name (runpy)."""
    return not frame.own and bool(_MODULE_START.search(frame.file))


def unescape(text: str) -> str:
    """Decode the escapes that faulthandler writes for non-ASCII characters; escape control characters for printing."""

    def decode_match(found: re.Match[str]) -> str:
        number = int(next(filter(None, found.groups())), 16)
        return chr(number) if number < 0x110000 else "\ufffd"

    return sanitize_line(_ESCAPED.sub(decode_match, text), 600)
