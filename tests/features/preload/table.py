"""Small tables of known packages, and installations of them, for tests of the import selector."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import run_command, write_program

TORCH = """
class default_generator:
    seed = staticmethod(lambda: None)
"""
"""Of a torch that is imported in no time."""


_WITH_TABLE = """
import sys
from ddplaunch.features.preload import known_packages
known_packages.TABLE_FILE = sys.argv.pop(1)
sys.argv[0] = "ddplaunch"
from ddplaunch.cli import main
main()
"""


class Installation:
    """A folder of installed packages, for PYTHONPATH, and the table that knows some of them."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "lib" / "site-packages"
        self._table = folder / "known.json"
        self._entries: dict[str, dict[str, Any]] = {}
        self.add("torch", TORCH)

    def write(self) -> Path:
        """Write the table to its file."""
        self._table.write_text(json.dumps(self._entries))
        return self._table

    def run(
        self, folder: Path, *words: str, env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the command with this table and these packages; ``stdin`` is what it can read."""
        typed = [sys.executable, "-c", _WITH_TABLE, str(self.write()), *words]
        return run_command(typed, folder, {"PYTHONPATH": str(self.site), **(env or {})}, input=stdin)

    def add(
        self,
        name: str,
        source: str = "",
        *,
        version: str = "1.2",
        known: bool = True,
        modules: Mapping[str, Iterable[str]] | None = None,
        **entry: Any,
    ) -> None:
        """Install a distribution of one module, or of a package and those in it, and put it into the table."""
        inside = [each.partition(".")[2] for each in modules or () if each.startswith(f"{name}.")]
        write_program(self.site, f"{name}/__init__.py" if inside else f"{name}.py", source)
        for each in inside:
            write_program(self.site, f"{name}/{each}.py", "")
        (self.site / f"{name}-{version}.dist-info").mkdir(exist_ok=True)
        listed = {each: list(words) for each, words in (modules or {name: ()}).items()}
        if known:
            made = {"top": [name], "versions": ["1.1"], "modules": listed, **entry}
            self._entries[name] = made
