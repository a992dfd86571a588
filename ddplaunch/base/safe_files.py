"""Opens files with untrusted paths safely: never blocks, limits sizes, and does not write through symbolic links.

A path may lead to a FIFO without a writer, a link to /dev/zero, or a file of a terabyte. Every file that a user, a
scheduler or a rank names is read, and every file in a folder where others may write is created, by these functions.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Mapping

FIFO_OPEN_TIMEOUT_S = 5.0  # for a writer to open a FIFO
MAX_HOSTFILE_BYTES = 16 << 20  # of a file that names hosts


def user_config_path(environ: Mapping[str, str]) -> str | None:
    """The path of the user's ddplaunch.toml, which may not exist; None without a home."""
    folder = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    return os.path.join(folder, "ddplaunch.toml") if os.path.isabs(folder) else None


def list_dir(folder: str) -> list[str]:
    """Return the sorted entries of a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read_user_file(path: str, max_bytes: int) -> bytes:
    """Read a file that a user has named on the command line, also ``/dev/stdin`` or ``<(…)``.

    Raises OSError if it cannot be read, has more than ``max_bytes`` bytes (EFBIG), or is a FIFO without a writer for
    FIFO_OPEN_TIMEOUT_S seconds (ETIMEDOUT).
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        fd = file.fileno()
        first = _read_first_chunk(fd, path) if stat.S_ISFIFO(os.fstat(fd).st_mode) else b""
        os.set_blocking(fd, True)
        return _check_size(first + file.read(max_bytes + 1), max_bytes, path)


def _read_first_chunk(fifo: int, path: str) -> bytes:
    """Wait until another process has opened the FIFO for writing; return the first bytes, b"" if there are none yet."""
    poll = select.poll()
    poll.register(fifo, 0)  # for POLLHUP: there was a writer
    deadline = time.monotonic() + FIFO_OPEN_TIMEOUT_S
    try:
        while not (data := os.read(fifo, 4096)) and not poll.poll(0):
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, "no process writes to this FIFO", path)
            time.sleep(0.02)
    except BlockingIOError:  # there is a writer, which has written nothing yet
        return b""
    return data


def read_regular_file(path: str, max_bytes: int, *, follow_symlinks: bool = True) -> bytes:
    """Read a regular file; ``follow_symlinks=False`` where a rank could have put a symbolic link there.

    Raises OSError if it cannot be read, is something else (EINVAL), or has more than ``max_bytes`` bytes (EFBIG).
    """
    return read_file_and_owner(path, max_bytes, follow_symlinks=follow_symlinks)[0]


def read_file_and_owner(path: str, max_bytes: int, *, follow_symlinks: bool = True) -> tuple[bytes, int]:
    """Read a regular file as ``read_regular_file`` does; return its bytes and its owner's uid."""
    fd = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_symlinks else os.O_NOFOLLOW)
    )
    with os.fdopen(fd, "rb") as file:
        owner = _check_regular_file(fd, path)
        return _check_size(file.read(max_bytes + 1), max_bytes, path), owner


def open_for_writing(path: str, flags: int, mode: int = 0o644) -> int:
    """Open a regular file for writing, create it if necessary; ``flags``: O_APPEND, O_TRUNC or O_EXCL.

    Raises OSError if it cannot be opened, or is a link (ELOOP), a FIFO or a device (EINVAL).
    """
    always = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, always | flags, mode)
    try:
        _check_regular_file(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def current_folder() -> str:
    """Return the path of the current folder; if the folder was removed, return the path that it had."""
    try:
        return os.getcwd()
    except OSError:
        pass
    try:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except OSError:
        return "/"


TEMP_PARENT_VARIABLE = "DDPLAUNCH_TMPDIR"
"""Variable with the parent of temporary folders: the launcher that sets it removes them, even if this one is killed."""


def make_private_dir(name: str) -> str | None:
    """Create a folder that only this user may enter, with random digits in its name; None if no parent allows it."""
    for parent in (os.environ.get(TEMP_PARENT_VARIABLE), os.environ.get("TMPDIR"), "/tmp", "/dev/shm"):
        if parent:
            try:
                # Absolute: ranks get the path, and may change their folder.
                path = os.path.join(os.path.abspath(parent), f"{name}-{os.urandom(8).hex()}")
                os.mkdir(path, 0o700)
            except OSError:  # no such folder (also the current one), not writable, full
                continue
            return path
    return None


def _check_regular_file(fd: int, path: str) -> int:
    """Return the uid of the owner of an open file; raise OSError if it is not a regular file."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return found.st_uid


def _check_size(data: bytes, max_bytes: int, path: str) -> bytes:
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", path)
    return data
