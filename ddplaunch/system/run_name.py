"""Names of runs: --name or the target's name, and a number that this user has not used with it on this machine.

The last number of each name is in a small file next to the history of runs, so a name is not used again when its run is
removed from there. Without a home, or if other launchers hold the file too long, the name is the time with random
digits.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress

from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.system.history_dir import history_dir, open_history_dir
from ddplaunch.system.target.target import Target, TargetKind

MAX_STEM = 30  # letters of the target's name: a control socket has 40 of the whole name
LOCK_TIMEOUT_S = 0.2  # while another launcher reserves the next number
LOCK_RETRY_S = 0.005
MAX_BYTES = 32  # of a file


def random_name() -> str:
    """Return a name from the time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def stem_of(target: Target) -> str:
    """Return the name of a target without folder, suffix and function: "train" of train.py:main and -m nets.train."""
    text = target.text
    if target.kind is TargetKind.FUNCTION:
        text, _, function = text.rpartition(":")
        if os.path.basename(os.path.dirname(text)).startswith("ddplaunch-"):  # a function that Python code has launched
            text = function
    if target.kind is TargetKind.MODULE or (target.kind is TargetKind.FUNCTION and "/" not in text):
        text = text.removesuffix(".py").removesuffix(".__main__").rpartition(".")[2]
    name = os.path.basename(os.path.normpath(text)) if text else ""
    if name in ("__main__.py", "__main__"):
        name = os.path.basename(os.path.dirname(os.path.abspath(text)))
    name = os.path.splitext(name)[0]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", name)[:MAX_STEM].strip("-_")
    return name if name and not name.isdecimal() else "-".join(filter(None, ("run", name)))


def next_name(stem: str, *, plain_first: bool, reserve: bool) -> str:
    """Return a name for the next run: "train-1", "train-2" …; with ``plain_first`` the first is the stem itself.

    ``reserve``: it is never returned again.
    """
    with suppress(OSError):
        if path := history_dir():
            return _choose_next_name(path, stem, plain_first, reserve)
    return random_name()


def _choose_next_name(history: str, stem: str, plain_first: bool, reserve: bool) -> str:
    """Return the name for the next run, and reserve its number if asked; raise OSError if that fails."""
    folder = os.path.join(os.path.dirname(history), "names")
    path = os.path.join(folder, stem)
    if not reserve:
        with suppress(OSError):
            return _find_free_name(history, stem, _parse(read_regular_file(path, MAX_BYTES)), plain_first)[0]
        return _find_free_name(history, stem, 0, plain_first)[0]
    parent = open_history_dir(folder, create=True)
    try:
        fd = os.open(stem, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        _lock(fd)
        name, number = _find_free_name(history, stem, _parse(os.read(fd, MAX_BYTES)), plain_first)
        os.ftruncate(fd, os.pwrite(fd, b"%d\n" % number, 0))  # a damaged file may be longer
    finally:
        os.close(fd)
    return name


def _find_free_name(history: str, stem: str, last: int, plain_first: bool) -> tuple[str, int]:
    """Return the first name with a number above ``last`` that no recorded run has, and the number."""
    number = last
    while True:
        number += 1
        name = stem if plain_first and number == 1 else f"{stem}-{number}"
        if not os.path.lexists(os.path.join(history, name)):
            return name, number


def _parse(data: bytes) -> int:
    text = data.strip()
    return int(text) if text.isdigit() else 0


def _lock(fd: int) -> None:
    """Lock a file. Raises OSError if that takes too long."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOCK_RETRY_S)
