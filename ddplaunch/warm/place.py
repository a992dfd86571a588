"""Where a user's warm zygotes listen: a socket each, in a folder that nobody else can enter."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress

from ddplaunch.sockets import MAX_PATH, folders, is_private, listening, peer_uid


def folder() -> str:
    """The folder for new ones, made if need be.

    Raises:
        OSError: there is no place for one that is private.
    """
    for path in folders("ddplaunch-warm"):
        with suppress(OSError):  # it is there, or cannot be made
            os.mkdir(path, 0o700)
        if is_private(path) and len(os.fsencode(path)) + 10 < MAX_PATH:
            return path
    raise OSError("there is no private folder for its socket")


def connect(path: str) -> socket.socket | None:
    """Connect to the warm zygote there; None where there is none.

    Raises:
        OSError: it is busy (EAGAIN), or it is another user's (EPERM).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
        if peer_uid(sock) != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError:
        sock.close()
        raise
    return sock


def claim(path: str) -> socket.socket:
    """Listen there, for a new warm zygote, in the place of one that was killed.

    Raises:
        OSError: another launcher does so at this moment (EAGAIN), or it cannot be done.
    """
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = connect(path)
        if there is not None:
            there.close()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with suppress(FileNotFoundError):
            os.unlink(path)
        return listening(path)
    finally:
        os.close(fd)


def all_sockets() -> list[str]:
    """The paths of all sockets, also of those that were killed."""
    found = []
    for path in filter(is_private, folders("ddplaunch-warm")):
        with suppress(OSError):
            found += [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return found
