"""Whether ddplaunch was installed again, or removed, since this process has started: later imports then fail."""

from __future__ import annotations

import os
import time

from ddplaunch.base import PACKAGE_DIR

_LOADED_AT = time.time()

REINSTALLED_TEXT = "ddplaunch was installed anew or removed while this command ran"


def was_reinstalled(folder: str = PACKAGE_DIR, loaded_at: float = _LOADED_AT) -> bool:
    """Return whether the files of the package are newer than this process, or gone."""
    try:
        return max(os.stat(os.path.join(folder, *each)).st_ctime for each in _FILES) > loaded_at
    except OSError:
        return True


_FILES = ("__init__.py",), ("base", "__init__.py")
