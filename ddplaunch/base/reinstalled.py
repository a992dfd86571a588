"""Detects that ddplaunch was reinstalled or removed while this process runs, so that later imports may fail."""

from __future__ import annotations

import os
import time

from ddplaunch.base import PACKAGE_DIR

_LOADED_AT = time.time()

REINSTALLED_TEXT = "ddplaunch was installed anew or removed while this command ran"


def was_reinstalled(folder: str = PACKAGE_DIR, loaded_at: float = _LOADED_AT) -> bool:
    """Whether files of the ddplaunch package were replaced or removed since this process loaded it."""
    try:
        return max(os.stat(os.path.join(folder, *each)).st_ctime for each in _FILES) > loaded_at
    except OSError:
        return True


_FILES = ("__init__.py",), ("base", "__init__.py")
