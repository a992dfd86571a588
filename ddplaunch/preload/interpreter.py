"""What runs in every interpreter before a program's first line, and may look at a variable that only a rank has.

Python imports ``sitecustomize`` and ``usercustomize``, and executes the lines of ``.pth`` files that begin with
"import" (https://docs.python.org/3/library/site.html). A zygote runs them before there is a rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection

from ddplaunch.files import read_regular
from ddplaunch.preload.table import holds_installed

_MAX = 1 << 20  # bytes of a file
_IMPORTED = re.compile(r"\b(?:import|from)\s+([\w.]+)")


def reads_rank(own: Collection[str]) -> str | None:
    """Name a file that mentions one of these variables, and the variable: "…/sitecustomize.py mentions RANK"."""
    wanted = re.compile(r"\b(" + "|".join(map(re.escape, sorted(own))) + r")\b")
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and (found := wanted.search(_text(path))):
            return f"{path} mentions {found[1]}"
    for folder in sys.path:
        if not holds_installed(folder):
            continue
        for entry in _pth(folder):
            text = "\n".join(line for line in _text(entry).splitlines() if line.startswith(("import ", "import\t")))
            if found := wanted.search(text):
                return f"{entry} mentions {found[1]}"
            for module in _IMPORTED.findall(text):
                path = os.path.join(folder, *module.split("."))
                for each in (path + ".py", os.path.join(path, "__init__.py")):
                    if found := wanted.search(_text(each)):
                        return f"{each} mentions {found[1]}"
    return None


def _pth(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, each) for each in sorted(os.listdir(folder)) if each.endswith(".pth")]
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        return read_regular(path, _MAX).decode(errors="replace")
    except OSError:
        return ""
