"""Parses stacks that Python has written as text: faulthandler dumps and tracebacks of exceptions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import chain, islice

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import sanitize_line
from ddplaunch.features.inspect.diagnosis.inspection import Frame, Thread

MAX_THREADS, MAX_FRAMES = 64, 100
_MIN_CUT_FRAMES = 98  # frames of a stack that faulthandler has cut, without those of ddplaunch

_THREAD = re.compile(
    r"(?:(Current t|T)hread 0x[0-9a-f]{1,16}|(Main t|T)ask) (?:\[(.*)\] )?\(most recent call first\):$"
)
_OUTER = b"Outer frames (most recent call first):"
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d{1,9}|\?\?\?),? in (.*)$')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+t?/|^<|^\?\?\?$")
"""Files that are not the user's: of packages, the standard library, and code without a file ("<frozen runpy>")."""

_MODULE_START = re.compile(r"^<frozen (?:runpy|importlib)|/lib(?:64)?/python3\.\d+t?/(?:runpy|importlib/__init__)\.py$")
"""Files whose frames call a program that was started by its module name (runpy)."""


def parse_dump(dump: bytes, folder: str, package: str = PACKAGE_DIR, *, outer: bytes = b"") -> tuple[Thread, ...]:
    """Parse faulthandler's dump of all threads, the main thread first; at most 64 threads of 100 frames.

    The outer frames of the main thread, which faulthandler omits from a deep stack, may follow in a section of their
    own, or are given as ``outer``. Only the user's frames of these are used: without them no user line is known.

    After them there may be asyncio tasks (``inspection_endpoint.py``). The frames of the main task are put before
    those of its event loop, as if the loop had called it; any other task counts as a thread.

    ``folder`` is the job's: files below it are named relative to it. ``package`` is ddplaunch's: frames of its parts
    that run inside ranks are removed. Lines of any other form are skipped.
    """
    threads: list[tuple[bool, str, list[Frame]]] = []
    tasks: list[tuple[bool, str, list[Frame]]] = []
    outer_frames: list[Frame] = []
    section = threads
    has_all_threads = True
    if outer and _OUTER not in dump:
        dump += outer
    for line in dump.decode(errors="replace").split("\n"):
        if line == _OUTER.decode():
            section = [(False, "", outer_frames)]
        elif head := _THREAD.match(line):
            section = tasks if head[2] else threads
            name = f"task {_unescape(head[3] or '')}" if head[2] else sanitize_line(head[3] or "")
            section.append(((head[1] or head[2]) != "T", name, []))
        elif section and (frame := _FRAME.match(line)):
            frames = section[-1][2]
            if len(frames) < MAX_FRAMES or frames is outer_frames:
                frames.append(_parse_frame(frame, folder, package))
        elif line == "...":  # more threads than faulthandler shows
            has_all_threads = False
    if not threads:
        return ()
    # Newest first, so the main thread is the last; else it is the current one, which took the signal.
    main = -1 if has_all_threads else next((number for number, each in enumerate(threads) if each[0]), -1)
    first = threads.pop(main)
    if len(first[2]) >= _MIN_CUT_FRAMES:
        first[2].extend([frame for frame in outer_frames if frame.own][-MAX_FRAMES:])
    others = [each for each in threads if each[2] and not is_internal_file(each[2][-1].file, package)]
    for is_main, name, frames in tasks:
        if is_main:
            first = first[0], first[1], [*frames, *first[2]]
        elif frames:
            others.append((False, name, frames))
    parsed = (Thread(_strip_internal(frames, package), name) for _, name, frames in chain([first], others))
    return tuple(islice(parsed, MAX_THREADS))


def parse_traceback(traceback: str, folder: str, package: str = PACKAGE_DIR) -> tuple[Frame, ...]:
    """Parse the frames of the last traceback that Python printed for an exception, the innermost first."""
    frames: list[Frame] = []
    for line in traceback.split("\n"):
        if line.startswith("Traceback (most recent call last):"):
            frames = []  # before it came the traceback of the exception's cause
        elif found := _FRAME.match(line):
            frames.append(_parse_frame(found, folder, package))
    return _strip_internal(frames[::-1][:MAX_FRAMES], package)


def _parse_frame(found: re.Match[str], folder: str, package: str) -> Frame:
    line = int(found[2]) if found[2].isdigit() else 0
    return make_frame(_unescape(found[3]), _unescape(found[1] or "???"), line, folder, package)


def make_frame(function: str, path: str, line: int, folder: str, package: str = PACKAGE_DIR) -> Frame:
    """Return a frame as ``parse_dump`` does: with the path relative to ``folder``, and whether it is user code."""
    is_internal = path.startswith(os.path.join(package, ""))
    own = not is_internal and not _INSTALLED.search(path)
    below = os.path.join(folder, "")
    if not is_internal and below != "/" and path.startswith(below):
        path = path[len(below) :]
    return Frame(function, path, line, own)


def is_internal_file(path: str, package: str = PACKAGE_DIR) -> bool:
    """Whether a file is part of ddplaunch that runs in ranks: it is in a folder ``rank`` of the package."""
    return path.startswith(os.path.join(package, "")) and "/rank/" in path[len(package) :]


def _strip_internal(frames: Iterable[Frame], package: str) -> tuple[Frame, ...]:
    """Remove ddplaunch's frames, and the outermost ones of runpy."""
    stripped = [frame for frame in frames if not is_internal_file(frame.file, package)]
    while stripped and is_module_start(stripped[-1]):
        stripped.pop()
    return tuple(stripped)


def is_module_start(frame: Frame) -> bool:
    """Whether this frame calls a program that was started by its module name (runpy)."""
    return not frame.own and bool(_MODULE_START.search(frame.file))


def _unescape(text: str) -> str:
    """Undo faulthandler's escapes; control characters are escaped for terminals instead."""

    def character(found: re.Match[str]) -> str:
        number = int(next(filter(None, found.groups())), 16)
        return chr(number) if number < 0x110000 else "\ufffd"

    return sanitize_line(_ESCAPED.sub(character, text), 600)
