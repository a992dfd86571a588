"""Which installed distribution a module's file belongs to, by what their RECORDs list."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from importlib import metadata

from ddplaunch.dataclass import dataclass
from ddplaunch.preload import verdict


@dataclass
class _Installed:
    name: str
    record: str
    root: str  # what its paths are relative to
    editable: bool
    lines: set[str] | None = None  # the paths in its RECORD

    def has(self, path: str) -> bool:
        if self.lines is None:
            with open(self.record, encoding="utf-8", errors="surrogateescape") as file:
                self.lines = {line.rsplit(",", 2)[0].strip('"') for line in file}
        return path in self.lines


class Installed:
    """All distributions of this interpreter; a RECORD is read once a file is looked for that it may list."""

    def __init__(self) -> None:
        self._by_top: dict[tuple[str, str], list[_Installed]] = {}
        for found in metadata.distributions(path=verdict.folders()):
            folder = str(getattr(found, "_path", ""))
            record = os.path.join(folder, "RECORD")
            if not os.path.isfile(record):  # an egg, or Debian's own way
                continue
            name = found.metadata["Name"] or os.path.basename(folder)
            each = _Installed(name, record, os.path.dirname(folder), _editable(folder))
            for top in _tops(record):
                self._by_top.setdefault((each.root, top), []).append(each)
        self._python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]

    def is_python(self, name: str, path: str) -> bool:
        """Whether a module is of the standard library, or built in."""
        if name.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(path.startswith(each + os.sep) and "-packages" + os.sep not in path for each in self._python)

    def owner(self, path: str) -> verdict.Distribution | str:
        """Return the distribution whose file this is, or in words why it is nobody's."""
        for root in verdict.folders():
            if not path.startswith(root + os.sep):
                continue
            inside = os.path.relpath(path, root).replace(os.sep, "/")
            for each in self._by_top.get((root, inside.partition("/")[0]), ()):
                if each.has(inside):
                    if each.editable:
                        return "is installed in editable mode"
                    found = verdict.digest_of_file(each.record)
                    return verdict.Distribution(each.name, each.record, verdict.stamp(each.record), found)
        return "belongs to no installed distribution"


def _tops(record: str) -> set[str]:
    with open(record, encoding="utf-8", errors="surrogateescape") as file:
        return {line.partition(",")[0].partition("/")[0] for line in file}


def _editable(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "direct_url.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("dir_info", {}).get("editable"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True  # who knows
