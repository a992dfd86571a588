"""What a node tells of its share of a job: lines to people; events and files to the folder of ``--log-dir``."""

from __future__ import annotations

import os
from typing import Any

from ddplaunch.agent.folder import LogFolder
from ddplaunch.output.streams import Output


class Journal:
    """The one place where it is told; events and files are dropped where no folder is wanted or there yet."""

    def __init__(self, output: Output, parent: str | None, *, alone: bool) -> None:
        """``parent`` is the folder of ``--log-dir``, None where there is none; ``alone``: no other node shares it."""
        self._alone = alone
        self._output = output
        self._parent = parent
        self._folder: LogFolder | None = None

    def open(self, run_id: str, node_rank: int) -> None:
        """Make the folder of this run, if one is wanted and not there yet.

        Raises:
            UsageError: it cannot be made.
        """
        if self._parent is not None and self._folder is None:
            self._folder = LogFolder(self._parent, run_id, None if self._alone else node_rank)

    @property
    def path(self) -> str | None:
        """The folder of this run."""
        return self._folder.path if self._folder else None

    def file(self, name: str) -> str | None:
        """The path of a file of this name in the folder."""
        return os.path.join(self._folder.path, name) if self._folder else None

    def rank_file(self, rank: int, attempt: int) -> str | None:
        """The path of what ``rank`` prints in the given attempt."""
        return self._folder.rank_file(rank, attempt) if self._folder else None

    def say(self, text: str) -> None:
        self._output.say("".join(f"ddplaunch: {line}\n" for line in text.splitlines()))

    def event(self, name: str, **fields: Any) -> None:
        if self._folder:
            self._folder.event(name, **fields)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Keep one JSON file."""
        if self._folder:
            self._folder.write(name, content)

    def close(self) -> None:
        """Say what could not be kept."""
        if self._folder and self._folder.trouble:
            self.say(f"the log folder is incomplete: {self._folder.trouble}")
