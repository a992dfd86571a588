"""Copies of code on a disk: each in a folder named by the hash of the code, which is complete once it has that name.

A program may write into its copy, which is then never removed. If it has changed a file of the code, the next job gets
another copy, ``NAME.2``.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

from ddplaunch.base.errors import LaunchError
from ddplaunch.base.safe_files import list_dir

FILE_TIME = 946_684_800
"""The modification time of all copied files: in 2000, as a zip archive has no time before 1980."""

KEPT_S = 30 * 86400.0  # after the last use, in a cache
_MAX_COPIES = 100  # of the same code


class CopyError(LaunchError):
    """Raised when the copy of the code cannot be written."""


def cache_folder() -> str:
    """Return the folder of the copies of this user on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "ddplaunch", "code")


def find_copy(parent: str, name: str) -> str | None:
    """Return the folder of the copy named ``name``; None if there is no copy, or a program has changed its code."""
    for folder in _folders(parent, name):
        if not os.path.isdir(folder):
            return None
        if not changed_files(folder):
            with suppress(OSError):
                os.utime(_file_list_path(folder))  # its last use
            return folder
    return None


def make_copy(parent: str, sha: str, name: str, data: bytes) -> str:
    """Unpack an archive with this SHA-256 into a new folder below ``parent``, and return that folder.

    Raises CopyError if the disk is full, for example, or the archive has another hash.
    """
    if found := find_copy(parent, name):
        return found
    new = ""
    try:
        packed = gzip.decompress(data)
        if hashlib.sha256(packed).hexdigest() != sha:
            raise CopyError(f"the code that came is not {sha}")
        os.makedirs(parent, 0o700, exist_ok=True)
        new = tempfile.mkdtemp(prefix=".new-", dir=parent)
        files = list(_unpack(packed, new))
        for folder in _folders(parent, name):
            _write_file_list(folder, files)
            try:
                os.rename(new, folder)
            except OSError:
                if not os.path.isdir(folder):
                    raise
            else:
                return folder
            if not changed_files(folder):  # another job was faster
                return folder
    except OSError as error:
        raise CopyError(f"cannot write the code to {parent}: {error.strerror}") from None
    finally:
        if new:
            shutil.rmtree(new, ignore_errors=True)
    raise CopyError(f"cannot write the code to {parent}: {_MAX_COPIES} copies of it were changed by programs")


def changed_files(folder: str) -> list[str]:
    """List the files of the code that were changed in a copy, or are missing there."""
    try:
        copied, found = _read_file_list(folder), dict(_describe_files(folder))
    except (OSError, ValueError):
        return [_file_list_path(folder)]
    return [path for path in copied if copied[path] != found.get(path)]


def written_files(folder: str) -> list[str]:
    """List the files that programs have created or changed in a copy, except for bytecode."""
    try:
        copied = _read_file_list(folder)
        return sorted(path for path, about in _describe_files(folder) if copied.get(path) != about)
    except (OSError, ValueError):
        return [_file_list_path(folder)]


def remove_copy(folder: str) -> list[str]:
    """Remove a copy. If a program has written files in the copy, keep it and return these files."""
    if not os.path.isdir(folder):
        return []
    if written := written_files(folder):
        return written
    with suppress(OSError):
        shutil.rmtree(folder)
        os.unlink(_file_list_path(folder))
    return []


def hold_copy(folder: str) -> None:
    """Keep a copy from being removed by ``remove_unused``, until this process ends."""
    with suppress(OSError):  # a file system without locks: then nothing is removed
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_unused(parent: str) -> None:
    """Remove copies not used for long, except those that a job uses or in which a program has changed files."""
    for name in list_dir(parent):
        folder = os.path.join(parent, name)
        with suppress(OSError):
            if name.startswith(".new-"):
                if os.lstat(folder).st_mtime < time.time() - KEPT_S:
                    shutil.rmtree(folder)
            elif os.path.isdir(folder) and os.lstat(_file_list_path(folder)).st_mtime < time.time() - KEPT_S:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_copy(folder)
                finally:
                    os.close(fd)


def _folders(parent: str, name: str) -> Iterator[str]:
    numbers = itertools.chain([""], (f".{number}" for number in range(2, _MAX_COPIES + 1)))
    return (os.path.join(parent, f"{name}{number}") for number in numbers)


def _file_list_path(folder: str) -> str:
    """Return the path of the file, beside a copy, that lists the files of the copy."""
    return f"{folder}.files"


def _read_file_list(folder: str) -> dict[str, tuple[int, str | None]]:
    with open(_file_list_path(folder)) as file:
        return {path: (size, link) for path, size, link in json.load(file)}


def _write_file_list(folder: str, files: list[tuple[str, int, str | None]]) -> None:
    path = _file_list_path(folder)
    if not os.path.exists(path):
        new = f"{path}.{os.getpid()}"
        with open(new, "w") as file:
            json.dump(files, file)
        os.rename(new, path)


def _unpack(packed: bytes, folder: str) -> Iterator[tuple[str, int, str | None]]:
    """Unpack an archive of ``archive.pack_folder`` into a folder, and yield path, size and link of each file."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for info in tar:
            path = os.path.join(folder, info.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if info.issym():
                os.symlink(info.linkname, path)
                yield info.name, 0, info.linkname
            elif data := tar.extractfile(info):
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode), "wb") as file:
                    shutil.copyfileobj(data, file)
                os.utime(path, (info.mtime, info.mtime))
                yield info.name, info.size, None


def _describe_files(folder: str) -> Iterator[tuple[str, tuple[int, str | None]]]:
    """Yield path, size and link of each file below a folder; the size of a file that was written later is -1."""
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in (*links, *names):
            path = os.path.join(where, name)
            info = os.lstat(path)
            link = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
            size = 0 if link is not None else info.st_size if info.st_mtime == FILE_TIME else -1
            yield os.path.relpath(path, folder), (size, link)
