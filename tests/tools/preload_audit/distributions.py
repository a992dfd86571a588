"""The distributions of this interpreter: versions, top-level modules, and the owner of each file."""

import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from ddplaunch.base.text import normalize_name

_NOT_MODULES = frozenset({"tests", "test", "docs", "examples", "benchmarks", "scripts"})


class InstalledDistributions:
    """All that have a RECORD.

    Attributes:
        versions: by distribution.
        top_modules: by distribution: the modules that its audit imports.
    """

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.top_modules: dict[str, list[str]] = {}
        self._owners: dict[str, str] = {}  # distributions by path
        for each in metadata.distributions():
            folder = Path(str(getattr(each, "_path", "")))
            name = normalize_name(each.metadata["Name"] or "")
            if not (folder / "RECORD").is_file() or name in self.versions:
                continue
            self.versions[name] = each.version
            root = os.path.realpath(folder.parent)
            paths = [line.rsplit(",", 2)[0].strip('"') for line in (folder / "RECORD").read_text().splitlines()]
            for path in paths:
                self._owners[os.path.normpath(os.path.join(root, path))] = name
            self.top_modules[name] = _find_top_modules(paths)
        self._python_folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]

    def has_module(self, module: str) -> bool:
        """Whether a module has a file: not every version of a distribution has all that its entry lists."""
        *parents, name = module.split(".")
        folders = [os.path.join(each, *parents) for each in sys.path]
        return any(
            each.partition(".")[0] == name for folder in filter(os.path.isdir, folders) for each in os.listdir(folder)
        )

    def is_python(self, module: str, path: str) -> bool:
        """Whether a module is of the standard library, or built in."""
        if module.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(path.startswith(each + os.sep) and "-packages" + os.sep not in path for each in self._python_folders)

    def find_owners(self, paths: Iterable[str]) -> set[str]:
        """The distributions of these files."""
        real = {os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths if path}
        return {self._owners[path] for path in real if path in self._owners}


def _find_top_modules(paths: list[str]) -> list[str]:
    """The top-level modules of these files; of a namespace package, which has no ``__init__``, those in it."""
    folders: dict[str, set[str]] = {}
    found = set[str]()
    for path in paths:
        parts = path.split("/")
        if path.startswith("..") or parts[0].endswith((".dist-info", ".data")) or "__pycache__" in parts:
            continue
        if not path.endswith((".py", ".so")) or not all(each.isidentifier() for each in parts[:-1]):
            continue
        stem = parts[-1].partition(".")[0]
        if len(parts) == 1:
            found.add(stem)
        else:
            folders.setdefault(".".join(parts[:-1]), set()).add(stem)
    packages = {folder for folder, stems in folders.items() if "__init__" in stems}
    for folder, stems in folders.items():
        above = folder.split(".")
        if any(".".join(above[:depth]) in packages for depth in range(1, len(above))):
            continue
        found |= {folder} if folder in packages else {f"{folder}.{stem}" for stem in stems}
    return sorted(
        each for each in found if each.partition(".")[0] not in _NOT_MODULES and not each.endswith(".__main__")
    )
