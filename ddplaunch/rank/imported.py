"""What a rank has imported by its end that was not imported for it; part of the worker, and bound by its rules."""

from __future__ import annotations

import os
import sys

_INSTALLED = ("/site-packages/", "/dist-packages/")
_MAX = 4000  # names


def tell(path: str, at_start: frozenset[str]) -> None:
    """Write the names of installed modules that were not there ``at_start``, in the order in which their imports ended.

    A file for those who may import them earlier the next time; without it they cannot, and that is all.
    """
    try:
        names = [name for name, module in list(sys.modules.items()) if name not in at_start and _installed(module)]
        if names:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, "\n".join(name for name in names[:_MAX] if name.isascii()).encode())
            finally:
                os.close(fd)
    except Exception:
        pass


def _installed(module: object) -> bool:
    file = getattr(module, "__dict__", {}).get("__file__")  # asking a lazy module itself might import it
    return isinstance(file, str) and any(each in file for each in _INSTALLED)
