"""The temporary folder of a run, and the files in it by which ranks and launcher tell each other something."""

from __future__ import annotations

import os
from collections.abc import Callable

from ddplaunch.files import make_private_dir, open_for_writing

PREEMPTED_FILE_VARIABLE = "DDPLAUNCH_PREEMPTED_FILE"


class RunTempDir:
    """A private folder, made once a zygote can remove it: whatever kills us before that leaves nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.path: str | None = None  # until it is made, and where no place for one can be written to

    def create(self, register_for_removal: Callable[[str], None]) -> None:
        """Make it, unless it is there already; ``register_for_removal`` a zygote of it."""
        self.path = self.path or make_private_dir(self._name)
        if self.path:
            register_for_removal(self.path)

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


class PreemptionFile:
    """How the ranks of this node learn that the job must make room, and whether they did; ``is_preempted``: whether it must.

    It appears then: any process can look for it, in any language, at the price of a system call, and nothing of a rank
    is interrupted. ``ddplaunch.runtime.preempted`` looks, and leaves a second file where it found the first.
    """

    def __init__(self, folder: RunTempDir) -> None:
        self._folder = folder
        self.is_preempted = self._seen = False

    @property
    def _path(self) -> str | None:
        return os.path.join(self._folder.path, "preempted") if self._folder.path else None

    def variables(self) -> dict[str, str]:
        return {PREEMPTED_FILE_VARIABLE: self._path} if self._path else {}

    def create(self) -> str | None:
        """Let the ranks know; return why they cannot see it, if so."""
        self.is_preempted = True
        if self._path is None:
            return "there is no folder for temporary files"
        try:
            os.close(open_for_writing(self._path, 0, 0o600))
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return None

    @property
    def was_seen(self) -> bool:
        """Whether a rank has found the file, or has ended as one that did."""
        return self._seen or (self._path is not None and os.path.exists(f"{self._path}.seen"))

    def mark_seen(self) -> None:
        """A rank has ended with the exit code of one that makes room, or handles the signal that tells it to."""
        self._seen = True
