"""The distributions of this interpreter: versions, top-level modules, and the owner of each module."""

import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from ddplaunch.base.text import normalize_name


class Installed:
    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self._files: dict[str, str] = {}  # distribution by path
        self._tops: dict[str, list[str]] = {}
        for each in metadata.distributions():
            folder = Path(str(getattr(each, "_path", "")))
            name = normalize_name(each.metadata["Name"] or "")
            if not (folder / "RECORD").is_file() or name in self.versions:
                continue
            self.versions[name] = each.version
            root = os.path.realpath(folder.parent)
            paths = [line.rsplit(",", 2)[0].strip('"') for line in (folder / "RECORD").read_text().splitlines()]
            for path in paths:
                self._files[os.path.normpath(os.path.join(root, path))] = name
            self._tops[name] = _tops(paths)
        self._python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]

    def tops(self, name: str) -> list[str]:
        return self._tops[name]

    def has(self, module: str) -> bool:
        """Whether there is a module, by its file: not every version of a distribution has all that are listed."""
        *parents, name = module.split(".")
        folders = [os.path.join(each, *parents) for each in sys.path]
        return any(
            each.partition(".")[0] == name for folder in filter(os.path.isdir, folders) for each in os.listdir(folder)
        )

    def is_python(self, module: str, path: str) -> bool:
        """Whether a module is of the standard library, or built in."""
        if module.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(path.startswith(each + os.sep) and "-packages" + os.sep not in path for each in self._python)

    def owner(self, path: str) -> str | None:
        """The distribution whose file this is; None where no distribution has it."""
        return self._files.get(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)))

    def owners(self, paths: Iterable[str]) -> set[str]:
        return {owner for path in paths if path and (owner := self.owner(path))}


def _tops(paths: list[str]) -> list[str]:
    """The modules at the top; of packages that have no ``__init__``, as they share a namespace, those within."""
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
    hidden = {"tests", "test", "docs", "examples", "benchmarks", "scripts"}
    return sorted(each for each in found if each.partition(".")[0] not in hidden and not each.endswith(".__main__"))
