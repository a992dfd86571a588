"""The fingerprint of a zygote: a run may use a warm zygote only if both have the same.

It has all that a fork inherits and all that imports read, except files: the warm zygote itself watches the files that
it has imported, and it reads no files of the user.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping

from ddplaunch import __version__
from ddplaunch.core.rank.zygote_messages import ZygoteConfig
from ddplaunch.features.warm.rank.inherited_state import read_inherited_state

_IGNORED_VARIABLES = frozenset({"PWD", "OLDPWD", "SHLVL", "_"})
_IGNORED_PREFIXES = ("TERM_", "SSH_", "TMUX", "DDPLAUNCH_")
_TERMINAL_VARIABLES = frozenset({"TERM", "TERMINFO", "COLUMNS", "LINES"})
"""Variables of a terminal. A rank compares the variables that an import has read, and may start over. So these, which
packages often read at their import, are in the fingerprint, unless only torch is imported."""

Fingerprint = Mapping[str, str]


def compute_fingerprint(program: str, config: ZygoteConfig, environ: Mapping[str, str]) -> Fingerprint:
    """Return the fingerprint of a zygote that would run ``program`` with ``environ`` and ``config``.

    Raises:
        OSError: the state of this process cannot be read.
        KeyError: it cannot be read on this CPU architecture.
    """
    has_packages = any(each.partition(".")[0] != "torch" for each in config["modules"])
    variables = {
        f"variable {name}": value
        for name, value in sorted(environ.items())
        if not (name in _IGNORED_VARIABLES or name.startswith(_IGNORED_PREFIXES))
        and (has_packages or name not in _TERMINAL_VARIABLES)
    }
    interpreter = os.stat(sys.executable)
    return {
        "python": f"{sys.executable} {os.path.realpath(sys.executable)} {interpreter.st_dev} {interpreter.st_ino}",
        "version": sys.version,
        "ddplaunch": f"{__version__} {program}",
        "modules": " ".join(config["modules"]),
        "import_environment": " ".join(f"{name}={value!r}" for name, value in config["import_environment"].items()),
        "shielded_signals": " ".join(map(str, config["shielded_signals"])),
        **{f"inherited {name}": value for name, value in read_inherited_state().items()},
        **variables,
    }


def fingerprint_id(found: Fingerprint) -> str:
    """Return a short hash of a fingerprint, for a file name; collisions are unlikely."""
    text = "\0".join(f"{name}={value}" for name, value in found.items())
    return f"{zlib.crc32(text.encode(errors='surrogateescape')):08x}"
