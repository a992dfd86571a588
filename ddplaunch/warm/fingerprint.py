"""What a run and a warm zygote must have in common: all that a fork inherits, and all that the imports have read.

Files are not among it: the warm zygote looks at those that it was made from itself. Nor are the user's own, which no
warm zygote has read.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping

from ddplaunch import TYPE_CHECKING, __version__
from ddplaunch.rank.inheritance import read_inherited_state

if TYPE_CHECKING:
    from ddplaunch.rank.messages import ZygoteConfig

_IGNORED_VARIABLES = frozenset({"PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"})
_IGNORED_PREFIXES = ("TERM", "SSH_", "TMUX", "DDPLAUNCH_")
"""Variables of a terminal or a moment: they count only where an import that is shared reads them."""

Fingerprint = Mapping[str, str]


def compute_fingerprint(program: str, config: ZygoteConfig, environ: Mapping[str, str]) -> Fingerprint:
    """Describe a zygote that would run ``program`` with ``environ`` and ``config``; in words to be compared.

    Raises:
        OSError: this process cannot be described.
        KeyError: not on this kind of machine.
    """
    reads = frozenset(config.get("reads", ()))
    variables = {
        f"variable {name}": value
        for name, value in sorted(environ.items())
        if name in reads or not (name in _IGNORED_VARIABLES or name.startswith(_IGNORED_PREFIXES))
    }
    interpreter = os.stat(sys.executable)
    return {
        "python": f"{sys.executable} {os.path.realpath(sys.executable)} {interpreter.st_dev} {interpreter.st_ino}",
        "version": sys.version,
        "ddplaunch": f"{__version__} {program}",
        "modules": " ".join(config["modules"]),
        "settings": " ".join(f"{name}={value!r}" for name, value in config["settings"].items()),
        "shielded": " ".join(map(str, config["shielded"])),
        **{f"inherited {name}": value for name, value in read_inherited_state().items()},
        **variables,
    }


def fingerprint_id(found: Fingerprint) -> str:
    """A name for it, which another one hardly has."""
    text = "\0".join(f"{name}={value}" for name, value in found.items())
    return f"{zlib.crc32(text.encode(errors='surrogateescape')):08x}"
