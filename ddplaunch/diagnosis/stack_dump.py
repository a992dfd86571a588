"""The text in which Python tells where threads are, as data: faulthandler's dumps, and the tracebacks of exceptions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import chain, islice

from ddplaunch.diagnosis.inspection import Frame, Thread
from ddplaunch.errors import sanitize_line

MAX_THREADS, MAX_FRAMES = 64, 100
_DEEP = 98  # frames of a stack that faulthandler has cut, at least: without those of ours

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_THREAD = re.compile(
    r"(?:(Current t|T)hread 0x[0-9a-f]{1,16}|(Main t|T)ask) (?:\[(.*)\] )?\(most recent call first\):$"
)
_OUTER = b"Outer frames (most recent call first):"
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d{1,9}|\?\?\?),? in (.*)$')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+t?/|^<|^\?\?\?$")
"""Files that are not the user's: packages', the standard library's, and code without a file ("<frozen runpy>")."""

_MODULE_START = re.compile(r"^<frozen (?:runpy|importlib)|/lib(?:64)?/python3\.\d+t?/(?:runpy|importlib/__init__)\.py$")
"""What calls a program that is started by its module's name."""


def parse_dump(dump: bytes, folder: str, package: str = _PACKAGE, *, outer: bytes = b"") -> tuple[Thread, ...]:
    """Read what ``faulthandler`` wrote for all threads, the main one first; at most 64 threads of 100 frames.

    The outer frames of the main thread, which faulthandler leaves out of a deep stack, may follow in a section of their
    own, or are given as ``outer``. Of these the user's are kept: without them no line of the program is known.

    After them there may be tasks of asyncio (``rank/answers.py``). What the main task is in comes before the calls of
    its loop, as if these had called it; any other task is a thread.

    ``folder`` is where the job runs: files below it are named relative to it. ``package`` is where ddplaunch is
    installed: what of it runs inside ranks is left out. A line that has another form is skipped.
    """
    threads: list[tuple[bool, str, list[Frame]]] = []
    tasks: list[tuple[bool, str, list[Frame]]] = []
    beyond: list[Frame] = []
    of = threads
    whole = True
    if outer and _OUTER not in dump:
        dump += outer
    for line in dump.decode(errors="replace").split("\n"):
        if line == _OUTER.decode():
            of = [(False, "", beyond)]
        elif head := _THREAD.match(line):
            of = tasks if head[2] else threads
            name = f"task {_unescape(head[3] or '')}" if head[2] else sanitize_line(head[3] or "")
            of.append(((head[1] or head[2]) != "T", name, []))
        elif of and (len(of[-1][2]) < MAX_FRAMES or of[-1][2] is beyond) and (found := _FRAME.match(line)):
            of[-1][2].append(_parse_frame(found, folder, package))
        elif line == "...":  # more threads than faulthandler shows
            whole = False
    if not threads:
        return ()
    # The newest comes first, so the main thread is the last; the current one is that which took the signal.
    main = -1 if whole else next((number for number, each in enumerate(threads) if each[0]), -1)
    first = threads.pop(main)
    if len(first[2]) >= _DEEP:
        first[2].extend([frame for frame in beyond if frame.own][-MAX_FRAMES:])
    mine = internal_prefixes(package)
    theirs = [each for each in threads if each[2] and not each[2][-1].file.startswith(mine)]
    for is_main, name, frames in tasks:
        if is_main:
            first = first[0], first[1], [*frames, *first[2]]
        elif frames:
            theirs.append((False, name, frames))
    cut = (Thread(_strip_internal(frames, mine), name) for _, name, frames in chain([first], theirs))
    return tuple(islice(cut, MAX_THREADS))


def parse_traceback(traceback: str, folder: str, package: str = _PACKAGE) -> tuple[Frame, ...]:
    """Read the frames of the last traceback in what Python printed for an exception, the innermost first."""
    frames: list[Frame] = []
    for line in traceback.split("\n"):
        if line.startswith("Traceback (most recent call last):"):
            frames = []  # that of the exception's cause came before
        elif found := _FRAME.match(line):
            frames.append(_parse_frame(found, folder, package))
    return _strip_internal(frames[::-1][:MAX_FRAMES], internal_prefixes(package))


def _parse_frame(found: re.Match[str], folder: str, package: str) -> Frame:
    line = int(found[2]) if found[2].isdigit() else 0
    return make_frame(_unescape(found[3]), _unescape(found[1] or "???"), line, folder, package)


def make_frame(function: str, path: str, line: int, folder: str, package: str = _PACKAGE) -> Frame:
    """Return a call with its file named, and told to be the user's, as ``parse_dump`` has it."""
    ours = path.startswith(os.path.join(package, ""))
    own = not ours and not _INSTALLED.search(path)
    below = os.path.join(folder, "")
    if not ours and below != "/" and path.startswith(below):
        path = path[len(below) :]
    return Frame(function, path, line, own)


def internal_prefixes(package: str = _PACKAGE) -> tuple[str, str]:
    """How the paths of our files begin that call the user's code."""
    return os.path.join(package, "rank", ""), os.path.join(package, "python", "")


def _strip_internal(frames: Iterable[Frame], mine: tuple[str, str]) -> tuple[Frame, ...]:
    """Leave out frames of ours, and what stands between them and the user's first."""
    kept = [frame for frame in frames if not frame.file.startswith(mine)]
    while kept and is_module_start(kept[-1]):
        kept.pop()
    return tuple(kept)


def is_module_start(frame: Frame) -> bool:
    """Whether this is what calls a program that is started by its module's name."""
    return not frame.own and bool(_MODULE_START.search(frame.file))


def _unescape(text: str) -> str:
    """Undo faulthandler's escapes; what would harm a terminal gets others."""

    def character(found: re.Match[str]) -> str:
        number = int(next(filter(None, found.groups())), 16)
        return chr(number) if number < 0x110000 else "\ufffd"

    return sanitize_line(_ESCAPED.sub(character, text), 600)
