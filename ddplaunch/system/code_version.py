"""Which code a run has, where ddplaunch has copied it: a launcher gets that in a variable, and records it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec import Struct

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import Name, TextLine, as_dict, convert

CODE_VARIABLE = "DDPLAUNCH_CODE"


class CodeVersion(Struct, frozen=True):
    """The code of a run: its hash, and where it comes from."""

    sha: Name  # the SHA-256 of its archive
    folder: TextLine  # that was copied
    commit: Name | None = None  # of git; None outside of a repository
    clean: bool = False  # whether the folder was as in the commit

    def __str__(self) -> str:
        since = "" if self.clean else ", with changes"
        return f"{self.name} of {self.folder}" + (f", commit {self.commit[:12]}{since}" if self.commit else "")

    @property
    def name(self) -> str:
        """The name of a folder with this code."""
        return self.sha[:16]

    def to_variable(self) -> str:
        """Return the value of ``CODE_VARIABLE``; bytes of paths that are not UTF-8 are preserved."""
        return json.dumps(as_dict(self))


def read_code_version(environ: Mapping[str, str]) -> CodeVersion | None:
    """Return the version that these variables name; None if ddplaunch has not copied the code of this run."""
    try:
        return convert(json.loads(environ.get(CODE_VARIABLE, "null")), CodeVersion)
    except (ProtocolError, ValueError):
        return None
