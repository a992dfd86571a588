"""The sockets of a user's warm zygotes: each has one, in a private folder. Connects, listens, cleans up."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddplaunch.base.local_sockets import (
    MAX_SOCKET_PATH,
    check_private_dir,
    is_private_dir,
    listen_unix,
    peer_uid,
    socket_dir_candidates,
)


def warm_socket_dir() -> str:
    """Return the folder for new sockets; create it if necessary.

    Raises OSError if no private folder can be created.
    """
    for path in socket_dir_candidates("ddplaunch-warm"):
        with suppress(OSError):
            _make_dir(path)
            if len(os.fsencode(path)) + 10 < MAX_SOCKET_PATH:
                return path
    raise OSError("there is no private folder for its socket")


def _make_dir(path: str) -> None:
    """Create a private folder; OSError if something else is there.

    Another launcher may create it at the same moment, and the last zygote to end removes it.
    """
    while True:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with suppress(FileNotFoundError):  # removed since
            check_private_dir(path)
            return


def connect(path: str) -> socket.socket | None:
    """Connect to the warm zygote at ``path``; None if there is none.

    Raises OSError if it is busy (EAGAIN), or another user's (EPERM).
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
    """Listen at ``path`` for a new warm zygote; replaces the socket of one that was killed.

    Raises OSError if another launcher is doing so (EAGAIN), or on another error.
    """
    while True:
        _make_dir(os.path.dirname(path))
        with (
            suppress(FileNotFoundError),
            _locked_path(path) as own,
        ):  # not found: a process has just removed the empty folder
            return listen_unix(own)


def remove_stale(path: str) -> None:
    """Remove the socket of a killed warm zygote, and its folder if that is empty then.

    Raises OSError if a zygote listens at ``path``, or another launcher is about to.
    """
    with _locked_path(path):
        pass
    remove_empty_dirs()


@contextmanager
def _locked_path(path: str) -> Iterator[str]:
    """Lock the folder of ``path`` and remove a stale socket; yield the path of the socket in the locked folder.

    The path is relative to the open folder (/proc/self/fd): the last zygote to end removes the folder without a lock,
    and another may have its path now. In a removed folder, creating the socket fails with FileNotFoundError.
    """
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own = f"/proc/self/fd/{fd}/{os.path.basename(path)}"
        listener = connect(own)
        if listener is not None:
            listener.close()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with suppress(FileNotFoundError):
            os.unlink(own)
        yield own
    finally:
        os.close(fd)


def remove_empty_dirs() -> None:
    """Remove the folders that are empty."""
    for path in filter(is_private_dir, socket_dir_candidates("ddplaunch-warm")):
        with suppress(OSError):
            os.rmdir(path)


def list_socket_paths() -> list[str]:
    """Return the paths of all sockets, also of zygotes that were killed."""
    paths = []
    for path in filter(is_private_dir, socket_dir_candidates("ddplaunch-warm")):
        with suppress(OSError):
            paths += [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return paths
