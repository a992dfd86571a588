"""Where a user's warm zygotes listen: a socket each, in a folder that nobody else can enter."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddplaunch.wire.sockets import MAX_SOCKET_PATH, is_private_dir, listen_unix, peer_uid, socket_dir_candidates


def warm_socket_dir() -> str:
    """The folder for new ones, made if need be.

    Raises:
        OSError: there is no place for one that is private.
    """
    for path in socket_dir_candidates("ddplaunch-warm"):
        with suppress(OSError):
            _make_dir(path)
            if len(os.fsencode(path)) + 10 < MAX_SOCKET_PATH:
                return path
    raise OSError("there is no private folder for its socket")


def _make_dir(path: str) -> None:
    while not is_private_dir(path):
        os.mkdir(path, 0o700)  # fails where something else is there; it may go again, with the last one in it


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


def listen_at(path: str) -> socket.socket:
    """Listen there, for a new warm zygote, in the place of one that was killed.

    Raises:
        OSError: another launcher does so at this moment (EAGAIN), or it cannot be done.
    """
    while True:
        _make_dir(os.path.dirname(path))
        with suppress(FileNotFoundError), _locked_path(path) as own:  # else the folder's last one has just removed it
            return listen_unix(own)


def remove_stale(path: str) -> None:
    """Remove what a killed one has left there, and its folder if that is empty then.

    Raises:
        OSError: somebody listens there, or is about to.
    """
    with _locked_path(path):
        pass
    remove_empty_dirs()


@contextmanager
def _locked_path(path: str) -> Iterator[str]:
    """Have nobody listen there, and nobody else begin to; yield its name within the very folder that is locked.

    Another may be where that was, as the last to end removes it without asking: then the file is missing.
    """
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own = f"/proc/self/fd/{fd}/{os.path.basename(path)}"
        there = connect(own)
        if there is not None:
            there.close()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with suppress(FileNotFoundError):
            os.unlink(own)
        yield own
    finally:
        os.close(fd)


def remove_empty_dirs() -> None:
    """Remove the folders, where they are empty."""
    for path in filter(is_private_dir, socket_dir_candidates("ddplaunch-warm")):
        with suppress(OSError):
            os.rmdir(path)


def all_sockets() -> list[str]:
    """The paths of all sockets, also of those that were killed."""
    found = []
    for path in filter(is_private_dir, socket_dir_candidates("ddplaunch-warm")):
        with suppress(OSError):
            found += [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return found
