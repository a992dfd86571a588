"""What is chosen to be imported once, as a dry run tells: by verdicts, doubts, options, and the number of ranks."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch, write
from tests.preload import verdicts

PROGRAM = "import torch\nimport lightning\nlightning.Trainer\n"
UNTRIED = "the other imports have not been tried yet"

Preload = Callable[..., dict[str, Any]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write(tmp_path, "train.py", PROGRAM)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def preload(answer: Launch, cache: Path) -> Preload:
    """What a dry run says of two ranks, or as these words have it."""

    def run(words: str = "--nproc 2", **environ: str) -> dict[str, Any]:
        environment = {"XDG_CACHE_HOME": str(cache), **environ}
        done = answer("run", "--dry-run", "--json", *shlex.split(words), "train.py", env=environment)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)["preload"]
        return found

    return run


def test_without_a_verdict_torch_alone(preload: Preload, script: Path, cache: Path):
    expected = {"modules": ["torch", "torch._dynamo"], "because": UNTRIED, "excluded": [], "verdict": None}
    assert preload() == expected
    assert not cache.exists()


def test_what_the_verdict_says(preload: Preload, script: Path, cache: Path, answer: Launch):
    reasons = {f"wandb{number}": "makes a temporary folder at import" for number in range(7)}
    modules = ["torch", "lightning"]
    file = verdicts.keep(cache, verdicts.question(script), modules, excluded=reasons)
    found = preload()
    assert (found["modules"], found["because"], found["verdict"]) == (modules, None, str(file))
    assert found["excluded"] == [list(pair) for pair in reasons.items()]
    text = answer("run", "--dry-run", "--nproc", "2", "train.py", env={"XDG_CACHE_HOME": str(cache)}).stdout
    assert f"preloaded: torch, lightning (tried; delete {file} to try anew)\n" in text
    assert "note: imported in each rank: wandb0 (makes a temporary folder at import), wandb1 " in text
    assert "wandb4 (makes a temporary folder at import), and 2 more\n" in text


def test_another_program_has_another_verdict(preload: Preload, script: Path, cache: Path):
    verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"])
    script.write_text(PROGRAM + "print('trained')\n")
    assert preload()["because"] is None
    script.write_text("import numpy\n" + PROGRAM)
    assert preload()["because"] == UNTRIED


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"modules": 3}', '{"modules": ["lightning"]}', "\0", "[" * 9999])
def test_a_broken_verdict_is_none(preload: Preload, script: Path, cache: Path, broken: str):
    verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"]).write_text(broken)
    assert preload()["because"] == UNTRIED


def test_a_verdict_of_other_packages_is_none(preload: Preload, script: Path, cache: Path, tmp_path: Path):
    record = write(tmp_path, "RECORD", "as it was tried")
    verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"], record=record)
    assert preload()["because"] is None
    record.write_text("upgraded")
    assert preload()["because"] == UNTRIED


@pytest.mark.parametrize("file", ["lightning.py", "lightning/__init__.py", "more/lightning.py"])
def test_a_file_of_the_users_is_not_hidden(preload: Preload, script: Path, cache: Path, tmp_path: Path, file: str):
    asked = verdicts.question(script)
    path = write(tmp_path, file, "")
    for each in {asked, verdicts.question(script)}:  # with a file beside it the program imports its own
        verdicts.keep(cache, each, ["torch", "lightning"], pythonpath=tmp_path / "more")
    found = preload(PYTHONPATH=str(tmp_path / "more"))
    assert found["modules"] == ["torch", "torch._dynamo"]
    assert found["because"] == f"{path} has the name of a module that would be imported"


@pytest.mark.parametrize(
    ("line", "modules", "because"),
    [
        ("import sys; sys.path.insert(0, '')\n", ["torch", "torch._dynamo"], "train.py:1 changes sys.path"),
        ("import os; os.environ['TMPDIR'] = '/tmp'\n", ["torch", "lightning"], None),
        (
            "import os; os.environ['OMP_NUM_THREADS'] = str(1 + 1)\n",
            [],
            "train.py:1 sets OMP_NUM_THREADS, which torch reads at its import, to what its source does not show",
        ),
        ("import os; os.environ['OMP_NUM_THREADS'] = '2'\n", ["torch", "lightning", "torch._dynamo"], None),
        (
            "import os; os.environ.setdefault('OMP_NUM_THREADS', str(2))\n",
            ["torch", "lightning", "torch._dynamo"],
            None,
        ),
    ],
)
def test_what_the_program_changes(preload: Preload, script: Path, cache: Path, line: str, modules, because):
    script.write_text(line + PROGRAM)
    verdicts.keep(cache, verdicts.question(script), ["torch", "lightning", "torch._dynamo"])
    found = preload()
    assert (found["modules"], found["because"]) == (modules, because)


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ("--preload none", []),
        ("--preload torch", ["torch", "torch._dynamo"]),
        ("--preload auto", ["torch", "lightning"]),
        ("--preload json,torch", ["json", "torch"]),
        ("--start exec", []),
        ("--start zygote", ["torch", "lightning"]),
    ],
)
def test_options(preload: Preload, script: Path, cache: Path, words: str, modules: list[str]):
    verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"])
    assert preload(f"--nproc 2 {words}")["modules"] == modules


@pytest.mark.parametrize(
    ("source", "words", "modules"),
    [
        ("import torch\ntorch.optim.SGD\n", "", ["torch"]),
        ("import torch\ntorch.optim.SGD\n", "--max-restarts 1", ["torch", "torch._dynamo"]),
        ("import torch\n", "--start exec", []),
        ("from ddplaunch import runtime\nimport torch\n", "", ["torch"]),
        ("def main(): import torch\n", "", []),
        ("def main(): import torch\n", "--start zygote", ["torch"]),
        ("import sys, torch\nsys.path.insert(0, '')\n", "", []),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", "", []),
        ("import os\nos.environ['HF_HOME'] = '/x'\nimport torch\n", "", ["torch"]),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch\n", "", []),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '2'\n", "", ["torch"]),
    ],
)
def test_one_rank_is_forked_only_where_it_cannot_tell(preload: Preload, tmp_path: Path, source, words, modules):
    write(tmp_path, "train.py", source)
    assert preload(f"--nproc 1 {words}")["modules"] == modules


def test_a_cache_of_somebody_else_is_none(preload: Preload, script: Path, cache: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"]).parent
    os.chown(folder, 1, 1)
    assert preload()["because"] == "there is no place for the cache"


def test_a_cache_that_others_may_read_is_made_private(preload: Preload, script: Path, cache: Path):
    folder = verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"]).parent
    folder.chmod(0o777)
    assert preload()["because"] is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_no_home_and_no_cache(preload: Preload, script: Path):
    assert preload(XDG_CACHE_HOME="", HOME="/nowhere")["because"] == "there is no place for the cache"


def test_a_folder_hides_only_what_is_not_installed(preload: Preload, script: Path, cache: Path, tmp_path: Path):
    """Packages without ``__init__.py`` are looked for last, but found."""
    verdicts.keep(cache, verdicts.question(script), ["torch", "lightning"], names=["click", "not_installed"])
    (tmp_path / "click").mkdir()
    assert preload()["because"] is None
    (tmp_path / "not_installed").mkdir()
    assert preload()["because"] == f"{tmp_path / 'not_installed'} has the name of a module that would be imported"
