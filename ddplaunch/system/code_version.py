"""The version of the code of a run that ddplaunch has copied: launchers get it in an environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec import Struct

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import Name, TextLine, as_dict, convert

CODE_VARIABLE = "DDPLAUNCH_CODE"


class CodeVersion(Struct, frozen=True):
    """The version of a run's code: the hash of its archive, and the folder and commit that it was copied from."""

    sha: Name  # the SHA-256 of its archive
    folder: TextLine  # the folder that was copied
    commit: Name | None = None  # the git commit; None outside of a repository
    clean: bool = False  # whether the folder was as in the commit

    def __str__(self) -> str:
        since = "" if self.clean else ", with changes"
        return f"{self.name} of {self.folder}" + (f", commit {self.commit[:12]}{since}" if self.commit else "")

    @property
    def name(self) -> str:
        """A short name of this version, for the folder with a copy of the code."""
        return self.sha[:16]

    def to_variable(self) -> str:
        """Return the value of ``CODE_VARIABLE``; bytes of paths that are not UTF-8 are preserved."""
        return json.dumps(as_dict(self))


def read_code_version(environ: Mapping[str, str]) -> CodeVersion | None:
    """Return the version of the code from CODE_VARIABLE; None if ddplaunch has not copied the code of this run."""
    try:
        return convert(json.loads(environ.get(CODE_VARIABLE, "null")), CodeVersion)
    except (ProtocolError, ValueError):
        return None
