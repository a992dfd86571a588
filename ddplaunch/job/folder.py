"""The folder of a user's doors: where it is, who may enter it, and what killed launchers have left there."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import suppress

MAX_PATH = 107  # bytes of a socket's path (unix(7))
MAX_NAME = 40  # bytes of the run id in a socket's name
_PEER = struct.Struct("iII")  # of SO_PEERCRED: pid, uid, gid


def candidates() -> list[str]:
    """Where the folder may be, the best place first; a client, whose variables may be others, looks in all."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parents = [each for each in (runtime, f"/run/user/{user}") if os.path.isabs(each)]
    return [*dict.fromkeys(os.path.join(each, "ddplaunch") for each in parents), f"/tmp/ddplaunch-{user}"]


def is_private(folder: str) -> bool:
    """Whether only this user can enter it or put another in its place; not where it is a link."""
    try:
        found, parent = os.lstat(folder), os.stat(os.path.dirname(folder))
    except OSError:
        return False
    user = os.geteuid()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    safe = bool(parent.st_mode & stat.S_ISVTX) or (parent.st_uid == user and not parent.st_mode & 0o022)
    return ours and safe


def listen(run_id: str) -> tuple[socket.socket, str] | tuple[None, None]:
    """Listen on a socket of our own; return it and its path, or twice None if there is no folder for it."""
    name = f"{os.fsencode(run_id)[:MAX_NAME].decode(errors='ignore')}.{os.getpid()}"
    for folder in candidates():
        path = os.path.join(folder, name)
        if len(os.fsencode(path)) > MAX_PATH:
            continue
        for _ in range(2):  # another launcher's last act may be to remove the folder that we have just made
            with suppress(OSError):  # it is there, or cannot be made
                os.mkdir(folder, 0o700)
            if not is_private(folder):
                break
            try:
                _alive(folder)
                return _listening(path), path
            except OSError as error:
                if error.errno != errno.ENOENT:
                    break
    return None, None


def _listening(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def remove(path: str) -> None:
    """Remove a socket, and its folder after the last one."""
    with suppress(OSError):  # others are there, or it has gone already
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def doors() -> list[str]:
    """The paths of all doors of this user on this machine."""
    return [path for folder in filter(is_private, candidates()) for path in _alive(folder)]


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, as it was when it connected or began to listen."""
    uid: int = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    return uid


def _alive(folder: str) -> list[str]:
    """Its sockets, but those of launchers that were killed, which are removed."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    alive: list[str] = []
    for name in names:
        path, pid = os.path.join(folder, name), name.rpartition(".")[2]
        if not (pid.isascii() and pid.isdecimal()):
            continue
        if _is_launcher(pid) or not _refuses(path):  # it may live in another PID namespace
            alive.append(path)
        else:
            with suppress(OSError):  # another process was quicker
                os.unlink(path)
    return alive


def _is_launcher(pid: str) -> bool:
    """Whether it is a process like us; to look is cheaper than to connect, which would wake it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"ddplaunch" in file.read()
    except OSError:
        return False


def _refuses(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False
