"""Verdicts written by hand, where a run looks for them: what a trial would have found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddplaunch.preload import program, verdict
from ddplaunch.preload.question import Question
from ddplaunch.target.target import find
from tests.conftest import write

IN_RANKS = ("OMP_NUM_THREADS", "RANK")
"""Of the variables that each rank has, those that the programs of these tests may set."""


def question(script: Path) -> Question:
    target = find(str(script), (), as_module=False, as_program=False, cwd=str(script.parent))
    return program.read(target).question({*os.environ, *IN_RANKS})


def keep(
    cache: Path,
    asked: Question,
    modules: Sequence[str],
    *,
    excluded: Mapping[str, str] | None = None,
    tried: Sequence[str] = (),
    record: Path | None = None,
    names: Sequence[str] | None = None,
    pythonpath: Path | None = None,
) -> Path:
    """Keep one in the folder that is XDG_CACHE_HOME of a run, and return its file.

    It holds as long as the file ``record`` is as it is now. ``names`` are those of all modules, unless it is to lie.
    ``pythonpath`` is the run's.
    """
    folder = cache / "ddplaunch" / "preload"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / verdict.key(asked, {"PYTHONPATH": str(pythonpath)} if pythonpath else {})
    distributions = []
    if record is not None:
        found = record.stat()
        stamp = [found.st_ino, found.st_size, found.st_mtime_ns]
        distributions = [{"name": "some", "record": str(record), "stamp": stamp, "digest": ""}]
    content = {
        "version": verdict.VERSION,
        "folders": [],
        "variables": [],
        "modules": list(modules),
        "excluded": [{"name": name, "reason": reason} for name, reason in (excluded or {}).items()],
        "distributions": distributions,
        "names": sorted({name.partition(".")[0] for name in modules}) if names is None else list(names),
        "tried": list(tried),
    }
    file.write_text(json.dumps(content))
    return file


def installed(folder: Path, **sources: str) -> Path:
    """Make a folder for PYTHONPATH that looks like one of installed packages, with these and a torch that is quick."""
    site = folder / "lib" / "site-packages"
    for name, source in {"torch": TORCH, **sources}.items():
        write(site, f"{name}.py", source)
    return site


TORCH = """
class default_generator:
    seed = staticmethod(lambda: None)
"""
