"""The log folder of a run (``--log-dir``): plan.json, events.jsonl, failure.json, stacks.json, one file per rank."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import open_for_writing
from ddplaunch.core.events import AttemptPlanned, Event, JobEnded, RanksInspected, Restarting, event_to_json


class RunLog:
    """The folder DIR/RUN_ID, or DIR/RUN_ID/node-N with several nodes, which may share a file system.

    A write error does not end the job; ``incomplete_note`` reports it. ``path`` is None until the folder exists, and
    without ``--log-dir``.
    """

    def __init__(self, parent: str | None, *, is_single_node: bool) -> None:
        """``parent`` is the folder of ``--log-dir``."""
        self._parent, self._is_single_node = parent, is_single_node
        self._started = time.monotonic()
        self._events_fd = -1
        self._events_bytes = 0
        self._attempt = 0
        self._write_error: str | None = None  # the last one
        self.path: str | None = None

    def open(self, run_id: str, node_rank: int, *, late: bool = False) -> None:
        """Create the folder, if requested and not created yet; RUN_ID.2 and so on if an earlier job has RUN_ID.

        ``late``: the job is running already, so RUN_ID is its own, and node-N may belong to the replaced node.
        Raises UsageError if the folder cannot be created.
        """
        if self._parent is None or self.path is not None:
            return
        try:
            runs = (os.path.join(self._parent, name) for name in candidate_names(run_id))
            node = f"node-{node_rank}"
            if late:
                found = [*itertools.takewhile(os.path.isdir, runs)] or [os.path.join(self._parent, run_id)]
                path = _make_first_new_dir(os.path.join(found[-1], name) for name in candidate_names(node))
            else:
                path = _make_first_new_dir(runs if self._is_single_node else (os.path.join(run, node) for run in runs))
            self._events_fd = open_for_writing(os.path.join(path, "events.jsonl"), os.O_APPEND)
        except OSError as error:
            message = f"--log-dir {self._parent}: {error.strerror}"
            raise UsageError(message, "use a folder with write permission") from None
        self.path = path

    @property
    def incomplete_note(self) -> str:
        """A message about what could not be written; "" if nothing is missing."""
        return f"the log folder is incomplete: {self._write_error}" if self._write_error else ""

    def file(self, name: str) -> str | None:
        return os.path.join(self.path, name) if self.path else None

    def rank_file_path(self, rank: int, attempt: int) -> str | None:
        return self.file(rank_file(rank, attempt))

    def observe(self, event: Event) -> None:
        if self.path is None:
            return
        if isinstance(event, AttemptPlanned):
            self._attempt = event.attempt
            self._write("plan.json", event.plan.to_json())
        if isinstance(event, RanksInspected):
            self._write(f"stacks{attempt_suffix(self._attempt)}.json", event.inspection.to_json())
        else:
            self._append_event(event)
        if isinstance(event, Restarting | JobEnded) and event.verdict:
            self._write("failure.json", event.verdict.to_json())

    def _append_event(self, event: Event) -> None:
        elapsed = round(time.monotonic() - self._started, 6)
        line = left = event_to_json(event, time.time(), elapsed=elapsed)
        try:
            while left:
                left = left[os.write(self._events_fd, left) :]
            self._events_bytes += len(line)
        except OSError as error:
            self._write_error = f"events.jsonl: {error.strerror}"
            with suppress(OSError):
                os.ftruncate(self._events_fd, self._events_bytes)  # a part of the line may have had room

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            with open(open_for_writing(os.path.join(self.path or "", name), os.O_TRUNC), "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
        except OSError as error:
            self._write_error = f"{name}: {error.strerror}"


def rank_file(rank: int, attempt: int) -> str:
    """The name of a rank's log file."""
    return f"rank-{rank}{attempt_suffix(attempt)}.log"


def attempt_suffix(attempt: int) -> str:
    """The part of a file name that names the attempt; "" for the first one."""
    return f".attempt-{attempt}" if attempt else ""


def _make_first_new_dir(paths: Iterator[str]) -> str:
    """Create the first of these folders that does not exist yet; return its path."""
    for path in paths:
        try:
            os.makedirs(path)
            break
        except FileExistsError:
            if not os.path.isdir(path):
                raise
    return path


def candidate_names(name: str) -> Iterator[str]:
    """The candidate names of a run or of one of its files: NAME, NAME.2, NAME.3, …"""
    return itertools.chain([name], (f"{name}.{count}" for count in itertools.count(2)))
