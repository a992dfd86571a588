"""The temporary folder of a run, and the preemption file in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.base.safe_files import make_private_dir, open_for_writing

PREEMPTED_FILE_VARIABLE = "DDPLAUNCH_PREEMPTED_FILE"


class RunTempDir:
    """The private temporary folder of a run, created once there is a zygote to remove it if the launcher is killed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.path: str | None = None  # None until it is created, or if no location is writable

    def create(self, register_for_removal: Callable[[str], None]) -> None:
        """Create the folder, unless it exists; ``register_for_removal`` is called with its path."""
        self.path = self.path or make_private_dir(self._name)
        if self.path:
            register_for_removal(self.path)

    def remove(self) -> None:
        """Remove the folder with its contents, unless another user's folder or a link has replaced it."""
        with suppress(OSError):
            if self.path and os.lstat(self.path).st_uid == os.geteuid():
                shutil.rmtree(self.path, ignore_errors=True)


class PreemptionFile:
    """A file that notifies the ranks of this node of a preemption.

    Any process can check for it, in any language, with one system call, and no rank is interrupted.
    ``ddplaunch.runtime.preempted`` checks for the file. If the file exists, the function creates a second one, which
    shows that a rank has seen the first.
    """

    def __init__(self, folder: RunTempDir) -> None:
        self._folder = folder
        self._seen = False

    @property
    def _path(self) -> str | None:
        return os.path.join(self._folder.path, "preempted") if self._folder.path else None

    def variables(self) -> dict[str, str]:
        return {PREEMPTED_FILE_VARIABLE: self._path} if self._path else {}

    def create(self) -> str | None:
        """Create the file; return the error, if any."""
        if self._path is None:
            return "there is no folder for temporary files"
        try:
            os.close(open_for_writing(self._path, 0, 0o600))
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return None

    @property
    def was_seen(self) -> bool:
        """Whether a rank has seen the file, or ended as if it had."""
        return self._seen or (self._path is not None and os.path.exists(f"{self._path}.seen"))

    def mark_seen(self) -> None:
        """Called when a rank has ended with the exit code for a preemption, or handles the preemption signal."""
        self._seen = True
