"""The folder of this machine that the launchers of all users share, for files that they lock."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from ddplaunch.base.errors import LaunchError, sanitize_line

FOLDER_VARIABLE = "DDPLAUNCH_LOCK_DIR"
"""Names another folder: containers that share GPUs need one that all of them mount."""

FOLDERS = ("/run/lock", "/dev/shm", "/tmp")
"""The first to which all users may write is used. The first two are empty after a reboot, and not cleaned before."""

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "afs")


class LockFolderError(LaunchError):
    """There is no folder for locks that the launchers of this machine could share."""


def find_lock_folder(environ: Mapping[str, str], mounts: str = "/proc/self/mountinfo") -> str:
    """Return the folder of the locks. Raises LockFolderError if it cannot be used."""
    if named := environ.get(FOLDER_VARIABLE):
        _check_folder(named, mounts)
        return named
    for folder in FOLDERS:
        if _is_shared(folder):
            return folder
    what = f"none of {', '.join(FOLDERS)} is a folder that all users of this machine may write to"
    raise LockFolderError(what, f"{FOLDER_VARIABLE}=FOLDER names another one")


def _is_shared(folder: str) -> bool:
    """Whether all users may create files in a folder, and delete only their own."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and mode & 0o1777 == 0o1777 and os.access(folder, os.W_OK | os.X_OK)


def _check_folder(folder: str, mounts: str) -> None:
    what = f"{FOLDER_VARIABLE}={sanitize_line(folder)}"
    if not os.path.isdir(folder):
        raise LockFolderError(f"{what}: there is no such folder", f"mkdir -m 1777 {sanitize_line(folder)}")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise LockFolderError(f"{what}: you may not write to this folder", "choose one that all users may write to")
    if (kind := _file_system(os.path.realpath(folder), mounts)) in NETWORK_FILE_SYSTEMS:
        why = f"{what} is on a network file system ({kind}), which other machines lock too"
        raise LockFolderError(why, "choose a folder of this machine, like /run/lock")


def _file_system(path: str, mounts: str) -> str:
    """Return the type of the file system that a path is on (proc_pid_mountinfo(5)); "" if it is unknown."""
    best, kind = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = mount.split()[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind
