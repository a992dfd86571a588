"""What runs before a program's first line, or in ``import torch``, without being named there, and may look at a rank.

Python imports ``sitecustomize`` and ``usercustomize``, and executes the lines of ``.pth`` files that begin with
"import" (https://docs.python.org/3/library/site.html). A zygote runs them before there is a rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping

from ddplaunch.files import read_regular_file
from ddplaunch.preload.table import entry_points, is_site_dir, list_dir
from ddplaunch.target import source

_MAX = 1 << 20  # bytes of a file
_IMPORTED = re.compile(r"\b(?:import|from)\s+([\w.]+)")


def find_rank_reader(own: Collection[str]) -> str | None:
    """Name a file that mentions one of these variables, and the variable: "…/sitecustomize.py mentions RANK"."""
    wanted = re.compile(r"\b(" + "|".join(map(re.escape, sorted(own))) + r")\b")
    return next((f"{path} mentions {found[1]}" for path, text in _site_files() if (found := wanted.search(text))), None)


def find_backend(first: str | None, environ: Mapping[str, str]) -> str | None:
    """Name a distribution with a backend that ``import torch`` loads, unless a variable of ``environ`` forbids that."""
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return None
    folders = filter(None, [first, *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    for path in [os.path.join(folder, entry) for folder in dict.fromkeys(folders) for entry in list_dir(folder)]:
        if path.endswith((".dist-info", ".egg-info")) and "torch.backends" in entry_points(path):
            return path
    return None


def _site_files() -> Iterator[tuple[str, str]]:
    for name in ("sitecustomize", "usercustomize"):
        if path := getattr(sys.modules.get(name), "__file__", None):
            yield path, _text(path)
    for folder in filter(is_site_dir, sys.path):
        for path in [os.path.join(folder, each) for each in list_dir(folder) if each.endswith(".pth")]:
            lines = [line for line in _text(path).splitlines() if line.startswith(("import ", "import\t"))]
            yield path, "\n".join(lines)
            for module in _IMPORTED.findall("\n".join(lines)):
                yield from ((file, _text(file)) for file in source.import_files(module, folder))


def _text(path: str) -> str:
    try:
        return read_regular_file(path, _MAX).decode(errors="replace")
    except OSError:
        return ""
