"""The folder of a user's control sockets: its path and permissions, and the removal of killed launchers' sockets."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from ddplaunch.base.local_sockets import (
    MAX_SOCKET_PATH,
    check_private_dir,
    is_private_dir,
    listen_unix,
    socket_dir_candidates,
)
from ddplaunch.base.safe_files import list_dir
from ddplaunch.system.processes.proc_utils import read_proc_file

MAX_NAME_BYTES = 40  # bytes of the run id in a socket's name


def candidate_dirs() -> list[str]:
    """Return the possible paths of the folder, the best first; a client, whose environment may differ, tries all."""
    return socket_dir_candidates("ddplaunch")


def open_control_socket(run_id: str) -> tuple[socket.socket, str] | tuple[None, None]:
    """Listen on a new control socket; return it and its path, or (None, None) if there is no folder for it."""
    name = f"{os.fsencode(run_id)[:MAX_NAME_BYTES].decode(errors='ignore')}.{os.getpid()}"
    for folder in candidate_dirs():
        path = os.path.join(folder, name)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            continue
        for _ in range(2):  # another launcher that ends may remove the folder that was just made
            with suppress(OSError):  # it exists, or cannot be made
                os.mkdir(folder, 0o700)
            try:
                check_private_dir(folder)
                _list_live_sockets(folder)
                return listen_unix(path), path
            except OSError as error:
                if error.errno != errno.ENOENT:
                    break
    return None, None


def remove_socket(path: str) -> None:
    """Remove a socket, and the folder if it was the last one."""
    with suppress(OSError):  # others are in the folder, or it is gone already
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def list_sockets() -> list[str]:
    """List the paths of all control sockets of this user on this machine."""
    return [path for folder in filter(is_private_dir, candidate_dirs()) for path in _list_live_sockets(folder)]


def _list_live_sockets(folder: str) -> list[str]:
    """List the sockets in a folder; those of killed launchers are removed."""
    alive: list[str] = []
    for name in list_dir(folder):
        path, pid = os.path.join(folder, name), name.rpartition(".")[2]
        if not (pid.isascii() and pid.isdecimal()):
            continue
        if _is_launcher(pid) or not _refuses_connection(path):  # it may live in another PID namespace
            alive.append(path)
        else:
            with suppress(OSError):  # another process was quicker
                os.unlink(path)
    return alive


def _is_launcher(pid: str) -> bool:
    """Whether this process is a launcher; reading /proc is cheaper than connecting, which would wake it."""
    return b"ddplaunch" in read_proc_file(pid, "cmdline")


def _refuses_connection(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False
