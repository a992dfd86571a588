"""Folders with a small JSON file for each job that this user has started or submitted, next to the history of runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from msgspec import Struct

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import list_dir, read_file_and_owner
from ddplaunch.base.types import as_dict, parse
from ddplaunch.system.history_dir import MAX_TARGET_CHARS, history_dir, open_history_dir

MAX_RECORDS = 1000  # in a folder; saving another one deletes the oldest
MAX_BYTES = 1 << 20  # of a record: a job array may have some thousand ends

R = TypeVar("R", bound=Struct)


class RecordFolder(Generic[R]):
    """A folder of records; without a home directory, nothing is stored."""

    def __init__(
        self, name: str, kind: type[R], file_name: Callable[[R], str], started_at: Callable[[R], float]
    ) -> None:
        """``name`` is the folder's; ``file_name`` and ``started_at`` are functions of a record (with a ``target``)."""
        self._name, self._kind, self._file_name, self._started_at = name, kind, file_name, started_at

    def list(self) -> list[R]:
        """List all records, the latest first; none if the folder is missing or belongs to another user."""
        try:
            os.close(open_history_dir(self._path, create=False))
        except OSError:
            return []
        return sorted(filter(None, map(self._read, self._names())), key=self._started_at, reverse=True)

    def reread(self, record: R) -> R:
        """Read a record again from its file; return ``record`` itself if the file cannot be read."""
        return self._read(self._file_name(record)) or record

    def save(self, record: R) -> bool:
        """Write a record, replacing an earlier one; delete the oldest records beyond ``MAX_RECORDS``.

        Returns whether it was written: the disk may be full or read-only.
        """
        fields = as_dict(record)
        target = sanitize_line(str(fields["target"]), MAX_TARGET_CHARS)
        text = json.dumps({**fields, "target": target}, ensure_ascii=False)
        data = text.encode("utf-8", "replace")  # paths may be any bytes, which would make the record unreadable
        name, new = self._file_name(record), f".{self._file_name(record)}.{os.getpid()}"
        with suppress(OSError):
            folder = open_history_dir(self._path, create=True)
            try:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
                for old in self.list()[MAX_RECORDS:] if len(self._names()) > MAX_RECORDS else ():
                    with suppress(OSError):  # another process deletes it too; this record is written
                        os.unlink(self._file_name(old), dir_fd=folder)
            finally:
                with suppress(OSError):  # it is there only if the disk is full
                    os.unlink(new, dir_fd=folder)
                os.close(folder)
            return True
        return False

    def remove(self, record: R) -> None:
        """Delete a record."""
        with suppress(OSError):
            os.unlink(os.path.join(self._path, self._file_name(record)))

    @property
    def _path(self) -> str:
        return os.path.join(os.path.dirname(history_dir() or "/nowhere/runs"), self._name)

    def _names(self) -> Sequence[str]:
        return [name for name in list_dir(self._path) if name.endswith(".json") and not name.startswith(".")]

    def _read(self, name: str) -> R | None:
        try:
            data, owner = read_file_and_owner(os.path.join(self._path, name), MAX_BYTES, follow_symlinks=False)
            return parse(data, self._kind) if owner == os.geteuid() else None
        except (OSError, ProtocolError):
            return None
