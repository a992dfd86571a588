"""``python -m tests.tools.mutation``: draws small faults at random, and counts those that tests find.

The tests of a fault's folder run, first those that name its module, last the slow ones. A test that hangs has found the
fault: it fails by pytest's own limit. Where the tests take longer than --limit, the fault counts as not found.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.tools.mutation.mutants import Mutant, list_mutants

ROOT = Path(__file__).parents[3]
PACKAGE = "ddplaunch"
GENERATED = {"keywords.py"}
ELSEWHERE = {
    "ddplaunch/core/rank": "tests/features/preload",
    "ddplaunch/features/kubernetes": "tests/kubernetes",
    "ddplaunch/features/submit": "tests/test_schedulers.py",
    "ddplaunch/features/debug": "tests/observe",
}
"""Tests of some folders that stand elsewhere, too."""

CACHES = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".*_cache", "site")


class Fault(NamedTuple):
    """A mutant of one file of the package."""

    file: str  # from the root of the repository
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.file}:{self.mutant.line}: {self.mutant.what}"


def list_faults() -> list[Fault]:
    """Return all faults of the package."""
    files = sorted(path for path in (ROOT / PACKAGE).rglob("*.py") if path.name not in GENERATED)
    return [Fault(str(path.relative_to(ROOT)), mutant) for path in files for mutant in list_mutants(path.read_text())]


class Copy:
    """A copy of the repository with an interpreter that imports the package from there."""

    def __init__(self, folder: Path) -> None:
        self.root = Path(shutil.copytree(ROOT, folder / "repository", ignore=CACHES))
        venv.create(folder / "venv", symlinks=True)
        self._python = folder / "venv/bin/python"
        paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        packages = Path(sysconfig.get_path("purelib", vars=paths))
        # A path in a .pth file does not run the .pth files there, so the editable install is not seen.
        (packages / "copy.pth").write_text(f"{self.root}\n{sysconfig.get_path('purelib')}\n")

    def try_fault(self, fault: Fault, limit_s: float) -> str:
        """Return how the tests end with this fault: "found", "limit" or "survived"."""
        path = self.root / fault.file
        source = path.read_text()
        path.write_text(fault.mutant.apply(source))
        try:
            for tests in self._stages(fault):
                if (how := self._run(tests, limit_s)) != "survived":
                    return how
            return "survived"
        finally:
            path.write_text(source)

    def _stages(self, fault: Fault) -> Iterator[Sequence[str]]:
        """Yield the arguments of pytest: quick tests that name the module, those of its folder, and the slow ones."""
        quick, slow = ("-m", "not slow and not ci"), ("-m", "slow or ci")
        named = [str(path) for path in sorted(self._naming(Path(fault.file).stem))]
        folder = self._folder(Path(fault.file).parent)
        if named:
            yield (*quick, *named)
        yield (*quick, folder)
        yield (*slow, *named, folder, *(each for name, each in ELSEWHERE.items() if fault.file.startswith(name)))

    def _naming(self, module: str) -> Iterator[Path]:
        word = re.compile(rf"\b{module}\b")
        for path in (self.root / "tests").rglob("test_*.py"):
            if path.stem == f"test_{module}" or any(
                word.search(line) for line in path.read_text().splitlines() if "import" in line
            ):
                yield path.relative_to(self.root)

    def _folder(self, package: Path) -> str:
        """The folder of tests that mirrors a folder of the package, or the next above that has one."""
        folder = Path("tests") / package.relative_to(PACKAGE)
        while not any((self.root / folder).glob("test_*.py")):
            folder = folder.parent
        return str(folder)

    def _run(self, words: Sequence[str], limit_s: float) -> str:
        command = [str(self._python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "VIRTUAL_ENV": ""}
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return "limit"
        return "survived" if done.returncode in (0, 5) else "found"  # 5: no test was selected


def main() -> None:
    """Print how each fault ended, and how many were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="copies that run at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of each of the three steps")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="the numbers of those to try")
    options = parser.parse_args()
    faults = list(enumerate(random.Random(options.seed).sample(list_faults(), options.count), 1))
    if options.only:
        faults = [(number, fault) for number, fault in faults if number in options.only]
    if options.list:
        print(*(f"{number:3} {fault} -> {fault.mutant.text.strip()}" for number, fault in faults), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: Queue[Copy] = Queue()
        for number in range(options.jobs):
            (own := Path(folder) / str(number)).mkdir()
            copies.put(Copy(own))

        def try_one(numbered: tuple[int, Fault]) -> str:
            copy = copies.get()
            try:
                how = copy.try_fault(numbered[1], options.limit)
            finally:
                copies.put(copy)
            print(f"{numbered[0]:3} {how:8} {numbered[1]} -> {numbered[1].mutant.text.strip()}", flush=True)
            return how

        results = list(pool.map(try_one, faults))
    late = results.count("limit")
    print(f"{results.count('found')} of {len(results)} found, {late} not within {options.limit:g} s")


if __name__ == "__main__":
    main()
