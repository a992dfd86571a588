"""Remembers the programs that could not use the preloaded modules: their next runs start without these modules."""

from __future__ import annotations

import json
import os
import time
from zlib import crc32

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import open_for_writing, read_regular_file
from ddplaunch.base.types import parse
from ddplaunch.system.history_dir import history_dir

MAX_STATE_BYTES = 1 << 20
_MAX_SOURCE_BYTES = 64 << 20
_MAX_PROGRAMS = 500  # the oldest are dropped
_MAX_AGE_S = 7 * 24 * 3600.0  # packages and settings change meanwhile


class PreloadMismatch(Struct, frozen=True):
    """An import of a program that did not fit what was preloaded.

    Attributes:
        module: what the program imported.
        differs: the line of the import, and what differed.
        had_packages: whether other packages than torch were preloaded.
        checksum: of the program's file: a changed program may behave differently.
        moment: seconds since the epoch.
    """

    module: str
    differs: str
    had_packages: bool
    checksum: int = 0
    moment: float = 0.0


def find_mismatch(program: str | None) -> PreloadMismatch | None:
    """Return the mismatch that was stored for the program in this file in the last days.

    None if there was none, or if the file has changed.
    """
    try:
        path = os.path.abspath(program or "")
        found = _read().get(path)
        if found is None or time.time() - found.moment > _MAX_AGE_S or found.checksum != checksum(path):
            return None
        return found
    except OSError:
        return None


def remember_mismatch(program: str | None, mismatch: PreloadMismatch) -> None:
    """Store the mismatch in a run of the program in this file; do nothing if the state folder cannot be used."""
    try:
        path = os.path.abspath(program or "")
        content = PreloadMismatch(mismatch.module, mismatch.differs, mismatch.had_packages, checksum(path), time.time())
        known = {name: each for name, each in _read().items() if name != path}
        known = dict([*known.items(), (path, content)][-_MAX_PROGRAMS:])
        file = state_file("mismatches")
        temporary = f"{file}.{os.getpid()}"
        os.makedirs(os.path.dirname(file), 0o700, exist_ok=True)
        with open(open_for_writing(temporary, os.O_TRUNC, 0o600), "w", encoding="utf-8") as new:
            json.dump({name: asdict(each) for name, each in known.items()}, new)
        os.replace(temporary, file)
    except OSError:
        pass


def state_file(name: str) -> str:
    """Return the path of a file of this feature in the user's state folder. OSError: this user has no home."""
    if (runs := history_dir()) is None:
        raise FileNotFoundError
    return os.path.join(os.path.dirname(runs), name)


def _read() -> dict[str, PreloadMismatch]:
    try:
        content = read_regular_file(state_file("mismatches"), MAX_STATE_BYTES, follow_symlinks=False)
        return parse(content, dict[str, PreloadMismatch])
    except (FileNotFoundError, ProtocolError):
        return {}


def checksum(path: str) -> int:
    """Return the CRC-32 of a program's file."""
    return crc32(read_regular_file(path, _MAX_SOURCE_BYTES))
