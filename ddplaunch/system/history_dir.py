"""The private folder of the history of runs; other records of jobs are in folders next to it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

MAX_TARGET_CHARS = 1000  # of the target in a record


def history_dir() -> str | None:
    """Return the folder of the history, which has a folder for each run; None where this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = os.path.expanduser("~")
        if not (os.path.isabs(home) and os.path.isdir(home)):  # "~" for a user without an entry in passwd
            return None
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "ddplaunch", "runs")


def open_history_dir(path: str, *, create: bool) -> int:
    """Open the folder of the history at ``path``, and return its descriptor.

    Raises OSError if it is missing, cannot be made, or belongs to another user.
    """
    parent = os.path.dirname(path)
    if create:
        os.makedirs(os.path.dirname(parent), 0o700, exist_ok=True)
    os.close(_open_private_dir(parent, make=create))
    return _open_private_dir(path, make=create)


def _open_private_dir(path: str, *, make: bool) -> int:
    if make:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:  # also of a symbolic link
        raise OSError(errno.ENOTDIR, f"{path} is not a folder", path) from None
    info = os.fstat(folder)
    if info.st_uid != os.geteuid():
        os.close(folder)
        raise OSError(errno.ENOTDIR, f"{path} belongs to another user", path)
    if stat.S_IMODE(info.st_mode) & 0o077:
        with suppress(OSError):  # on a read-only file system, where it can still be read
            os.fchmod(folder, 0o700)
    return folder
