"""Copies the package and runs the copy, for tests that add a toy command, cluster or vendor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ddplaunch
from tests.conftest import clean_environment

PACKAGE = Path(ddplaunch.__file__).parent
START = "import sys; sys.argv[0] = 'ddplaunch'; from ddplaunch.cli import main; main()"


def copy_package(folder: Path) -> Path:
    """Copy the package into a folder, beside an empty ``train.py``; its bytecode too, which takes a second to make."""
    (folder / "train.py").touch()
    return Path(shutil.copytree(PACKAGE, folder / "ddplaunch"))


def add_feature(package: Path, name: str, **files: str) -> None:
    """Add a feature to a copy of the package: a folder with these files (without ``.py``), and a line in the list."""
    folder = package / "features" / name
    for file, text in files.items():
        path = folder / f"{file}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    table = package / "features" / "__init__.py"
    whole = table.read_text()
    assert "\n)\n" in whole
    table.write_text(whole.replace("\n)\n", f'\n    "{name}",\n)\n', 1))


def run_copy(folder: Path, *words: str, **variables: str) -> str:
    """Run the copy's command; return all that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", START, *words],
        cwd=folder,
        env=clean_environment({**variables, "PYTHONPATH": str(folder)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout
