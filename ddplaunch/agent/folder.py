"""The files of a run: the temporary folder for error files, and the folder that ``--log-dir`` keeps."""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any

from ddplaunch.errors import UsageError


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
            self._events = os.open(
                os.path.join(self.path, "events.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
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
            with open(os.path.join(self.path, name), "w", encoding="utf-8") as file:
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


def temporary_path(run_id: str) -> str | None:
    """Choose a private folder for error files; None where no place for one can be written to.

    The zygote makes it once it can also remove it: what kills us before that leaves nothing.
    """
    for parent in (os.environ.get("TMPDIR"), "/tmp", "/dev/shm"):
        if parent and os.access(parent, os.W_OK | os.X_OK):
            return os.path.join(parent, f"ddplaunch-{run_id}-{os.getpid()}")
    return None


def remove_temporary(path: str | None) -> None:
    """Remove such a folder and its files, if it is ours (``zygote._make_private``)."""
    if path is None:
        return
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        pass


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
