"""What was read of a program's modules is remembered as long as they are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.preload import scans
from ddplaunch.preload.program import Program, read
from ddplaunch.target.target import find
from tests.conftest import write

MODEL = "import os, numpy\nos.environ['A'] = '1'\nimport sys\nsys.path.insert(0, '')\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ddplaunch" / "preload"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read, by name, as they are."""
    found: list[str] = []
    real = scans._read
    monkeypatch.setattr(scans, "_read", lambda file: (found.append(os.path.basename(file)), real(file))[1])
    return found


def program(folder: Path) -> Program:
    return read(find("train.py", (), as_module=False, as_program=False, cwd=str(folder)))


def test_a_module_is_parsed_once(tmp_path: Path, parsed: list[str]):
    write(tmp_path, "train.py", "import model, torch\n")
    write(tmp_path, "model.py", MODEL)
    first = program(tmp_path)
    assert first.doubt == "model.py:4 changes sys.path"
    assert (program(tmp_path), parsed) == (first, ["train.py", "model.py", "train.py"])
    write(tmp_path, "model.py", "import scipy\n")
    assert [each.module for each in program(tmp_path).statements] == ["scipy", "torch"]
    assert parsed[3:] == ["train.py", "model.py"]


def test_a_script_alone_keeps_nothing(tmp_path: Path, cache: Path):
    write(tmp_path, "train.py", "import torch\n")
    program(tmp_path)
    assert not cache.exists()


@pytest.mark.parametrize("broken", ["", "[]", '[1, {"model.py": 3}]', "[0, {}]", "[" * 9999, '[1, [["import"]]]'])
def test_what_is_kept_may_be_broken(tmp_path: Path, cache: Path, broken: str):
    write(tmp_path, "train.py", "import model, torch\n")
    write(tmp_path, "model.py", MODEL)
    first = program(tmp_path)
    (kept,) = cache.iterdir()
    kept.write_text(broken)
    assert program(tmp_path) == first


def test_a_large_program_is_read_in_several_runs(tmp_path: Path):
    names = [f"m{number}" for number in range(3)]
    write(tmp_path, "train.py", f"import {', '.join(names)}, torch\n")
    for name in names:
        write(tmp_path, f"{name}.py", "x = 1\n" * (scans._MAX_PARSED // 10) + "import numpy\n")
    doubts = [program(tmp_path).doubt for _ in names]
    assert doubts == ["its modules have more source than is read at once"] * 2 + [None]
