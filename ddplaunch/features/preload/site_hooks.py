"""Finds start-up hooks that may depend on the rank: sitecustomize, ``.pth`` files, and torch's backend plugins.

Python imports ``sitecustomize`` and ``usercustomize``, and executes the lines of ``.pth`` files that begin with
"import" (https://docs.python.org/3/library/site.html). A zygote runs them before a rank, and its variables, exist.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping

from ddplaunch.base.safe_files import list_dir, read_regular_file
from ddplaunch.features.preload.known_packages import entry_points, is_site_dir
from ddplaunch.system.target import source

_MAX_FILE_BYTES = 1 << 20
_IMPORTED = re.compile(r"\b(?:import|from)\s+([\w.]+)")


def find_rank_reader(rank_variables: Collection[str]) -> str | None:
    """Find a start-up hook that mentions one of these variables: "…/sitecustomize.py mentions RANK"."""
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(rank_variables))) + r")\b")
    hooks = _site_files()
    return next((f"{path} mentions {match[1]}" for path, text in hooks if (match := pattern.search(text))), None)


def find_backend(sys_path_0: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the metadata folder of a distribution whose backend plugin ``import torch`` loads.

    None without one, or if ``TORCH_DEVICE_BACKEND_AUTOLOAD`` in ``environ`` disables them.
    """
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return None
    folders = filter(None, [sys_path_0, *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    for path in [os.path.join(folder, entry) for folder in dict.fromkeys(folders) for entry in list_dir(folder)]:
        if path.endswith((".dist-info", ".egg-info")) and "torch.backends" in entry_points(path):
            return path
    return None


def _site_files() -> Iterator[tuple[str, str]]:
    """The start-up hooks of this interpreter, path and text: of ``.pth`` files the executed lines and their imports."""
    for name in ("sitecustomize", "usercustomize"):
        if path := getattr(sys.modules.get(name), "__file__", None):
            yield path, _read_text(path)
    for folder in filter(is_site_dir, sys.path):
        for path in [os.path.join(folder, each) for each in list_dir(folder) if each.endswith(".pth")]:
            lines = [line for line in _read_text(path).splitlines() if line.startswith(("import ", "import\t"))]
            yield path, "\n".join(lines)
            for module in _IMPORTED.findall("\n".join(lines)):
                yield from ((file, _read_text(file)) for file in source.import_files(module, folder))


def _read_text(path: str) -> str:
    try:
        return read_regular_file(path, _MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
