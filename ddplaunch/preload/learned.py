"""What versions before 1.0 had learned of programs by trying their imports: no longer read, and removed."""

from __future__ import annotations

import os
from contextlib import suppress


def remove() -> None:
    """Remove the folder, if it is there and this user's."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(cache, "ddplaunch", "preload")
    with suppress(OSError):
        if os.lstat(folder).st_uid == os.geteuid() and not os.path.islink(folder):
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
            os.rmdir(os.path.dirname(folder))
