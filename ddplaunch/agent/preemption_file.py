"""The preemption file: how the ranks of this node learn that the job must make room, and whether they did.

It appears then: any process can look for it, in any language, at the price of a system call, and nothing of a rank is
interrupted. ``ddplaunch.runtime.preempted`` looks, and leaves a second file where it found the first.
"""

from __future__ import annotations

import os

from ddplaunch.agent.temporary import Temporary
from ddplaunch.files import create

VARIABLE = "DDPLAUNCH_PREEMPTED_FILE"


class PreemptionFile:
    """That of one node; ``given`` is whether the job must make room."""

    def __init__(self, folder: Temporary) -> None:
        self._folder = folder
        self.given = self._seen = False

    @property
    def _path(self) -> str | None:
        return os.path.join(self._folder.path, "preempted") if self._folder.path else None

    def variables(self) -> dict[str, str]:
        return {VARIABLE: self._path} if self._path else {}

    def give(self) -> str | None:
        """Let the ranks know; return why they cannot see it, if so."""
        self.given = True
        if self._path is None:
            return "there is no folder for temporary files"
        try:
            os.close(create(self._path, 0, 0o600))
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return None

    @property
    def seen(self) -> bool:
        """Whether a rank has found the file, or has ended as one that did."""
        return self._seen or (self._path is not None and os.path.exists(f"{self._path}.seen"))

    def answered(self) -> None:
        """A rank has ended with the exit code of one that makes room, or handles the signal that tells it to."""
        self._seen = True
