"""Unix sockets for processes of the same user: private folders for them, and a check of the peer's uid."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

MAX_SOCKET_PATH = 107  # bytes of a socket's path (unix(7))
_UCRED = struct.Struct("iII")  # of SO_PEERCRED: pid, uid, gid


def socket_dir_candidates(name: str) -> list[str]:
    """Return possible paths of the private folder ``name`` for Unix sockets, the best first; a client searches all."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parents = [each for each in (runtime, f"/run/user/{user}") if os.path.isabs(each)]
    return [*dict.fromkeys(os.path.join(each, name) for each in parents), f"/tmp/{name}-{user}"]


def is_private_dir(folder: str) -> bool:
    """Whether only this user can enter or replace this folder; False for a symbolic link."""
    try:
        check_private_dir(folder)
    except OSError:
        return False
    return True


def check_private_dir(folder: str) -> None:
    """Raise OSError if another user can enter or replace this folder: FileNotFoundError if it does not exist."""
    found, parent = os.lstat(folder), os.stat(os.path.dirname(folder))
    user = os.geteuid()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    safe = bool(parent.st_mode & stat.S_ISVTX) or (parent.st_uid == user and not parent.st_mode & 0o022)
    if not (ours and safe):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), folder)


def listen_unix(path: str) -> socket.socket:
    """Return a non-blocking socket that listens at ``path``.

    Raises OSError if the path exists (EADDRINUSE), or there is no such folder.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def peer_uid(sock: socket.socket) -> int:
    """The uid of the peer process, at the time when it connected or began to listen."""
    uid: int = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    return uid


def find_free_port() -> int:
    """Return a loopback port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
