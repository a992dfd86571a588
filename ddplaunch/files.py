"""Opening files that others have named or may have made: no waiting, no more bytes than needed, no links in our place.

A path may lead to a FIFO that nobody writes to, a link to /dev/zero, or a file of a terabyte. All that a user, a
scheduler or a rank names is read, and all that is written where others may write is made, by these functions.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Mapping

FIFO_OPEN_TIMEOUT_S = 5.0  # seconds for somebody to open a FIFO that was named
MAX_HOSTFILE_BYTES = 16 << 20  # bytes of a file that names hosts, at most


def user_config_path(environ: Mapping[str, str]) -> str | None:
    """The path of the user's own ddplaunch.toml, which need not be there; None without a home."""
    folder = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    return os.path.join(folder, "ddplaunch.toml") if os.path.isabs(folder) else None


def read_user_file(path: str, max_bytes: int) -> bytes:
    """Return what a user has named on the command line: a file, or what stands for one (``/dev/stdin``, ``<(…)``).

    Raises OSError if it cannot be read, has more than ``max_bytes`` bytes (EFBIG), or is a FIFO that nobody has begun
    to write to in FIFO_OPEN_TIMEOUT_S seconds (ETIMEDOUT).
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        fd = file.fileno()
        first = _read_first_chunk(fd, path) if stat.S_ISFIFO(os.fstat(fd).st_mode) else b""
        os.set_blocking(fd, True)
        return _check_size(first + file.read(max_bytes + 1), max_bytes, path)


def _read_first_chunk(fifo: int, path: str) -> bytes:
    """Wait for a writer of a FIFO; return what there is by then."""
    poll = select.poll()
    poll.register(fifo, 0)  # for POLLHUP, which says that there was a writer
    until = time.monotonic() + FIFO_OPEN_TIMEOUT_S
    try:
        while not (data := os.read(fifo, 4096)) and not poll.poll(0):
            if time.monotonic() > until:
                raise OSError(errno.ETIMEDOUT, "nobody writes to this FIFO", path)
            time.sleep(0.02)
    except BlockingIOError:  # there is one, who has said nothing yet
        return b""
    return data


def read_regular_file(path: str, max_bytes: int, *, follow_symlinks: bool = True) -> bytes:
    """Return the bytes of a regular file; where a rank could have put a symbolic link there, ``follow_symlinks`` is False.

    Raises OSError if it cannot be read, is something else (EINVAL), or has more than ``max_bytes`` bytes (EFBIG).
    """
    return read_file_and_owner(path, max_bytes, follow_symlinks=follow_symlinks)[0]


def read_file_and_owner(path: str, max_bytes: int, *, follow_symlinks: bool = True) -> tuple[bytes, int]:
    """Return the bytes of a regular file as ``read_regular_file`` does, and the user whose that file is."""
    fd = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_symlinks else os.O_NOFOLLOW)
    )
    with os.fdopen(fd, "rb") as file:
        owner = _check_regular_file(fd, path)
        return _check_size(file.read(max_bytes + 1), max_bytes, path), owner


def open_for_writing(path: str, flags: int, mode: int = 0o644) -> int:
    """Open a file of ours for writing, made if need be; ``flags`` are O_APPEND, O_TRUNC or O_EXCL.

    Raises OSError if it cannot be opened, or something is in its place: a link (ELOOP), a FIFO, a device (EINVAL).
    """
    always = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, always | flags, mode)
    try:
        _check_regular_file(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def make_private_dir(name: str) -> str | None:
    """Make a folder that only we may enter, its name ending in random digits; None where there is no place for one."""
    for parent in (os.environ.get("TMPDIR"), "/tmp", "/dev/shm"):
        if parent:
            path = os.path.join(parent, f"{name}-{os.urandom(8).hex()}")
            try:
                os.mkdir(path, 0o700)
            except OSError:  # no such folder, not ours to write to, full
                continue
            return path
    return None


def _check_regular_file(fd: int, path: str) -> int:
    """Return whose file it is."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return found.st_uid


def _check_size(data: bytes, max_bytes: int, path: str) -> bytes:
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", path)
    return data
