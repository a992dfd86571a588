"""The temporary folder of a run, for error files and what else ranks and launcher tell each other by files."""

from __future__ import annotations

import os
from collections.abc import Callable

from ddplaunch.files import make_private_folder


class Temporary:
    """A private folder, made once a zygote can remove it: whatever kills us before that leaves nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.path: str | None = None  # until it is made, and where no place for one can be written to

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
