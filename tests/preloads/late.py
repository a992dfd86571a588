"""What a program had imported at its end that the table does not list: candidates for an entry's modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.preloads.installed import Installed
from tests.preloads.known import Known

_LISTED = """
import atexit, json, sys
def tell():
    found = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in list(sys.modules.items())}
    with open(ANSWER, "w") as file:
        json.dump({name: path for name, path in found.items() if isinstance(path, str)}, file)
"""
_PROGRAM = (
    _LISTED
    + """
import runpy
sys.argv[:] = WORDS
sys.path[0] = FOLDER
try:
    runpy.run_path(WORDS[0], run_name="__main__")
finally:
    tell()
"""
)
_ENTRIES = (
    _LISTED
    + """
import importlib
for name in WORDS:
    importlib.import_module(name)
tell()
"""
)


def show(words: Sequence[str], known: Known) -> int:
    """Print them by distribution, in the order in which they were imported."""
    installed = Installed()
    loaded = _loaded(_PROGRAM, words)
    owners = installed.owners(loaded.values())
    listed = [
        module
        for name in sorted(owners & known.packages.keys() | {"torch"})
        if "refused" not in known.packages.get(name, {})
        for module in known.packages.get(name, {}).get("modules", {"torch": []} if name == "torch" else {})
    ]
    there = _loaded(_ENTRIES, listed)
    found: dict[str, list[str]] = {}
    for module, path in loaded.items():
        owner = installed.owner(path)
        if owner and module not in there:
            found.setdefault(owner, []).append(module)
    print(json.dumps(found, indent=2))
    return 0


def _loaded(program: str, words: Sequence[str]) -> dict[str, str]:
    """Installed modules with their files at the end of a program."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer"
        folder = os.path.dirname(os.path.abspath(words[0])) if words else scratch
        given = f"ANSWER, WORDS, FOLDER = {str(answer)!r}, {list(words)!r}, {folder!r}\n"
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([sys.executable, "-c", given + program], env=environ, check=False)
        found: dict[str, str] = json.loads(answer.read_text())
    return found
