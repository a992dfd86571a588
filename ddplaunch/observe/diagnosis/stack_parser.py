"""Parses faulthandler's dumps of all threads."""

from __future__ import annotations

import re
from itertools import chain, islice

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.stack_frames import (
    FRAME_LINE,
    MAX_FRAMES,
    Frame,
    is_internal_file,
    parse_frame_line,
    strip_internal_frames,
    unescape,
)
from ddplaunch.observe.diagnosis.inspection import Thread

MAX_THREADS = 64
_MIN_CUT_FRAMES = 98  # frames of a stack that faulthandler has cut, without those of ddplaunch

_THREAD = re.compile(
    r"(?:(Current t|T)hread 0x[0-9a-f]{1,16}|(Main t|T)ask) (?:\[(.*)\] )?\(most recent call first\):$"
)
_STAGE = r'{}/core/rank/rank_runner\.py", line \d+ in (setup|exit|run_program)$'
_OUTER = b"Outer frames (most recent call first):"


def parse_dump(dump: bytes, folder: str, package: str = PACKAGE_DIR, *, outer: bytes = b"") -> tuple[Thread, ...]:
    """Parse faulthandler's dump of all threads, the main thread first; at most 64 threads of 100 frames.

    The outer frames of the main thread, which faulthandler omits from a deep stack, may follow in a section of their
    own, or are given as ``outer``. Only the user's frames of these are used: without them no user line is known.

    After them there may be asyncio tasks (``rank/stacks.py``). The frames of the main task are put before
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
            name = f"task {unescape(head[3] or '')}" if head[2] else sanitize_line(head[3] or "")
            section.append(((head[1] or head[2]) != "T", name, []))
        elif section and (frame := FRAME_LINE.match(line)):
            frames = section[-1][2]
            if len(frames) < MAX_FRAMES or frames is outer_frames:
                frames.append(parse_frame_line(frame, folder, package))
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
    parsed = (Thread(strip_internal_frames(frames, package), name) for _, name, frames in chain([first], others))
    return tuple(islice(parsed, MAX_THREADS))


def find_stage_outside_program(dump: bytes, threads: tuple[Thread, ...], package: str = PACKAGE_DIR) -> str:
    """Return the state of a rank that runs no user code but has not ended: "about to begin", …; else "".

    The evidence is the function of ddplaunch below the program's stack (``rank_runner.py``): ``exit`` runs when the
    program is over. A rank that is otherwise in ``run_program`` belongs to a session, and waits for its next call.
    """
    if not threads or threads[0].frames:
        return ""
    inside = set(re.findall(_STAGE.format(re.escape(package)).encode(), dump, re.MULTILINE))
    if b"exit" in inside or not inside:
        return ""
    return "about to begin" if b"setup" in inside else "between two calls"
