"""The files of a run: the temporary folder for error files, and the folder that ``--log-dir`` keeps."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

from ddplaunch.errors import UsageError
from ddplaunch.files import create, make_private_folder


class LogFolder:
    """DIR/RUN_ID with plan.json, events.jsonl, a file a rank and attempt, and failure.json.

    Once it exists, no failure to write ends the job: ``note`` hears of the first.
    """

    def __init__(self, parent: str, run_id: str, node_rank: int | None) -> None:
        """Create the folder; nodes of one job, who may share a file system, get one each in the job's.

        Where a job of this run id was kept before, it is RUN_ID.2, and so on.

        Raises:
            UsageError: it cannot be created.
        """
        node = [] if node_rank is None else [f"node-{node_rank}"]
        self._began = time.monotonic()
        self.trouble: str | None = None
        try:
            self.path = _made(parent, run_id, node)
            self._events = create(os.path.join(self.path, "events.jsonl"), os.O_APPEND)
        except OSError as error:
            raise UsageError(f"--log-dir {parent}: {error.strerror}", "name a folder that you may write to") from None

    def rank_file(self, rank: int, attempt: int) -> str:
        """The path of what ``rank`` prints in the given attempt."""
        again = f".attempt-{attempt}" if attempt else ""
        return os.path.join(self.path, f"rank-{rank}{again}.log")

    def event(self, name: str, **fields: Any) -> None:
        """Append one line to events.jsonl: the time, seconds since the start, the event and its fields."""
        line = {"time": time.time(), "elapsed": round(time.monotonic() - self._began, 6), "event": name, **fields}
        try:
            os.write(self._events, json.dumps(line).encode() + b"\n")
        except OSError as error:
            self.trouble = f"events.jsonl: {error.strerror}"

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON file."""
        try:
            with open(create(os.path.join(self.path, name), os.O_TRUNC), "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
        except OSError as error:
            self.trouble = f"{name}: {error.strerror}"


def _made(parent: str, run_id: str, node: list[str]) -> str:
    for count in itertools.count(1):
        path = os.path.join(parent, run_id if count == 1 else f"{run_id}.{count}", *node)
        try:
            os.makedirs(path)
            return path
        except FileExistsError:
            if not os.path.isdir(path):
                raise
    raise AssertionError


class Temporary:
    """A private folder of this run, for error files and what else its ranks and we tell each other by files.

    It is made when there is a zygote that can remove it: whatever kills us before that leaves nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.path: str | None = None
        """None until it is made, and where no place for one can be written to."""

    def make(self, tell: Callable[[str], None]) -> None:
        """Make it, unless it is there already; ``tell`` a zygote of it."""
        self.path = self.path or make_private_folder(self._name)
        if self.path:
            tell(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it; not what somebody has put in its place."""
        if self.path:
            _remove_folder(self.path, None)


def _remove_folder(path: str, parent: int | None) -> None:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    _remove_folder(entry.name, folder)
                else:
                    os.unlink(entry.name, dir_fd=folder)
            os.rmdir(path, dir_fd=parent)
    except OSError:
        pass
    finally:
        os.close(folder)


class StoreFile:
    """The file behind ``--init-method file://``, which torch makes and nobody removes."""

    def __init__(self, init_method: str | None, *, fresh: bool) -> None:
        """``fresh``: whether nobody else begins an attempt before us, so that each may have a new one."""
        method = init_method or ""
        self.path = method.removeprefix("file://") if method.startswith("file://") else None
        self._fresh = fresh

    def begin(self) -> None:
        """An attempt begins: what an earlier one wrote would mislead it."""
        if self._fresh:
            self.remove()

    def remove(self) -> None:
        if self.path:
            try:
                os.unlink(self.path)
            except OSError:
                pass
