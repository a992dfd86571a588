"""The folder in which verdicts are kept, with what the last runs imported late; of this user alone.

Losing it costs a slower start, so no trouble with it is ever told, and any file that is broken counts as none.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress

from ddplaunch.dataclass import dataclass
from ddplaunch.files import create, read_regular
from ddplaunch.preload import verdict
from ddplaunch.preload.question import Question
from ddplaunch.preload.verdict import Verdict

MAX_LATE = 4000  # names of modules
_MAX_BYTES = 1 << 20  # of the file with these
_MAX_KEPT = 100  # verdicts
_MAX_AGE = 90 * 86400  # seconds since a verdict was made


@dataclass(frozen=True)
class Entry:
    """What is kept for one question, or could be."""

    path: str  # of its files, but for their endings

    @property
    def verdict_file(self) -> str:
        return self.path + ".json"

    @property
    def verdict(self) -> Verdict | None:
        return verdict.read(self.verdict_file)

    @property
    def late(self) -> tuple[str, ...]:
        """What good runs had imported by their end, beyond what was imported for them."""
        try:
            words = read_regular(self.path + ".late", _MAX_BYTES, links=False).decode("ascii").split()
        except (OSError, ValueError):
            return ()
        return tuple(words[:MAX_LATE])

    def keep_late(self, names: tuple[str, ...]) -> None:
        write(os.path.basename(self.path) + ".late", "\n".join(names))

    def make_room(self) -> bool:
        """Return whether a verdict can be kept here, where those that are old make room for it."""
        folder = os.path.dirname(self.path)
        made = _own(folder, make=True)
        if made:
            _prune(folder)
        return made

    def forget(self) -> None:
        """The verdict was wrong."""
        with suppress(OSError):
            os.unlink(self.verdict_file)


def place() -> str | None:
    """Where the cache is (XDG Base Directory Specification); None where this user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        home = os.path.expanduser("~")
        if not os.path.isdir(home):
            return None
        cache = os.path.join(home, ".cache")
    return os.path.join(cache, "ddplaunch", "preload")


def entry(question: Question, environ: Mapping[str, str]) -> Entry | None:
    """What is kept for a question in this environment; None where nothing can be kept."""
    folder = place()
    if folder is None or not _own(folder, make=False):
        return None
    return Entry(os.path.join(folder, verdict.key(question, environ).removesuffix(".json")))


def read(name: str, max_bytes: int) -> bytes:
    """Return the bytes of a file that is kept. OSError: it is not there, or cannot be trusted."""
    folder = place()
    if folder is None or not _own(folder, make=False):
        raise FileNotFoundError(name)
    return read_regular(os.path.join(folder, name), max_bytes, links=False)


def write(name: str, text: str) -> bool:
    """Replace a file at once, so that nobody reads half of it; return whether it is there."""
    folder = place()
    if folder is None or not _own(folder, make=True):
        return False
    path = os.path.join(folder, name)
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(create(temporary, os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        return False
    return True


def _own(folder: str, *, make: bool) -> bool:
    """Whether the folder is this user's alone; one that is not there yet is, if it can be made."""
    try:
        if make:
            os.makedirs(os.path.dirname(os.path.dirname(folder)), 0o700, exist_ok=True)
            for each in (os.path.dirname(folder), folder):
                with suppress(FileExistsError):
                    os.mkdir(each, 0o700)
        found = os.lstat(folder)
    except FileNotFoundError:
        return not make
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return False
    if stat.S_IMODE(found.st_mode) & 0o077:
        try:
            os.chmod(folder, 0o700)
        except OSError:
            return False
    return True


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _prune(folder: str) -> None:
    """Remove what is old, and the oldest of too many."""
    found: list[tuple[float, str]] = []
    for name in _names(folder):
        with suppress(OSError):
            path = os.path.join(folder, name)
            found.append((os.lstat(path).st_mtime, path))
    found.sort(reverse=True)
    for number, (made, path) in enumerate(found):
        if number >= 3 * _MAX_KEPT or made < time.time() - _MAX_AGE:
            with suppress(OSError):
                os.unlink(path)
