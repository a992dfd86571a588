"""Tests of the preload plan in a dry run: by the table, the options, and the number of ranks."""

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Launch, write_program
from tests.features.preload.table import Installation

Preload = Callable[..., dict[str, Any]]


@pytest.fixture
def preload(run_in_fork: Launch) -> Preload:
    """What a dry run says of two ranks, or as these words have it."""

    def run(words: str = "--nproc 2", **environ: str) -> dict[str, Any]:
        done = run_in_fork("run", "--dry-run", "--json", *shlex.split(words), "train.py", env=environ)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)["preload"]
        return found

    return run


def test_a_dry_run_names_unknown_packages(preload, tmp_path, run_in_fork):
    names = [f"unknown{number}" for number in range(7)]
    more = tmp_path / "site-packages"
    for name in names:
        write_program(more, f"{name}.py", "exec('')\n")
    imports = "".join(f"import {name}\n" for name in ("torch", *names, "yaml"))
    write_program(tmp_path, "train.py", imports)
    found = preload(PYTHONPATH=str(more))
    assert found["modules"] == ["torch"]
    assert found["because"] == "train.py:2, an import of unknown0, where unknown0.py:1 calls exec"
    assert found["excluded"][0] == ["unknown0", "not in the table"]
    assert found["excluded"][-1] == ["yaml", f"comes after {found['because']}"]
    text = run_in_fork("run", "--dry-run", "--nproc", "2", "train.py", env={"PYTHONPATH": str(more)}).stdout
    assert "preloaded: torch (imported once for all ranks)\n" in text
    assert "note: imported in each rank: unknown0 (not in the table), unknown1 (not in the table)" in text
    assert "and 3 more\n" in text


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ("--preload none", []),
        ("--preload torch", ["torch", "torch._dynamo"]),
        ("--preload auto", ["torch", "yaml", "torch._dynamo"]),  # what is known comes after torch
        ("--preload json,torch", ["json", "torch"]),
        ("--start exec", []),
        ("--start zygote", ["torch", "yaml", "torch._dynamo"]),
    ],
)
def test_options_choose_what_is_preloaded(preload, tmp_path, words, modules):
    write_program(tmp_path, "train.py", "import torch, yaml\ntorch.optim\n")
    assert preload(f"--nproc 2 {words}")["modules"] == modules


@pytest.mark.parametrize("name", ["TMPDIR", "USER", "LOGNAME", "TORCHINDUCTOR_CACHE_DIR"])
def test_dynamo_is_not_preloaded_if_the_program_sets_a_variable_that_it_reads(preload, tmp_path, name):
    write_program(tmp_path, "train.py", f"import os\nos.environ[{name!r}] = '/tmp'\nimport torch, yaml\ntorch.optim\n")
    assert preload("--nproc 2")["modules"] == ["torch", "yaml"]


@pytest.mark.parametrize(
    ("line", "because"),
    [
        ("import sys; exec(sys.argv[1])", "calls exec"),
        (
            "import os; os.environ['OMP_NUM_THREADS'] = str(1 + 1)",
            "sets OMP_NUM_THREADS to a value that its source does not show",
        ),
    ],
)
def test_a_statement_after_which_nothing_is_preloaded_is_named(preload, tmp_path, line, because):
    write_program(tmp_path, "train.py", f"{line}\nimport torch, yaml\n")
    found = preload("--nproc 2")
    assert (found["modules"], found["because"]) == ([], f"train.py:1, which {because}")


@pytest.mark.parametrize(
    ("source", "words", "modules"),
    [
        ("import torch\ntorch.optim.SGD\n", "", ["torch"]),
        ("import torch\ntorch.optim.SGD\n", "--max-restarts 1", ["torch", "torch._dynamo"]),
        ("import torch, yaml\n", "", ["torch", "yaml"]),
        ("import torch\n", "--start exec", []),
        ("from ddplaunch import runtime\nimport torch\n", "", ["torch"]),
        ("def main(): import torch\n", "", []),
        ("def main(): import torch\n", "--start zygote", ["torch"]),
        ("import sys, torch\nsys.path[:0] = ['']\n", "", []),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", "", []),
        ("import os\nos.environ['HF_HOME'] = '/x'\nimport torch\n", "", ["torch"]),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch\n", "", []),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '2'\n", "", ["torch"]),
    ],
)
def test_one_rank_is_forked_only_where_it_sees_no_difference(preload, tmp_path, source, words, modules):
    write_program(tmp_path, "train.py", source)
    assert preload(f"--nproc 1 {words}")["modules"] == modules


READS_RANK = "import os\nMAIN = os.environ.get('RANK', '0') == '0'\n"


@pytest.mark.parametrize(
    "files",
    [
        {"sitecustomize.py": READS_RANK},
        {"hook.pth": "import os; os.environ.get('LOCAL_RANK')\n"},
        {"hook.pth": "import hook_of_rank\n", "hook_of_rank.py": READS_RANK},
        {"hook.pth": "import hook_of_rank; hook_of_rank.go()\n", "hook_of_rank/__init__.py": READS_RANK},
    ],
)
def test_start_files_that_read_the_rank_prevent_forking(tmp_path, files):
    made = Installation(tmp_path)
    for name, text in files.items():
        write_program(made.site, name, text)
    write_program(tmp_path, "train.py", "import os, torch\nprint(os.getppid() > 0)\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["True", "True", "[0]", "[1]"]), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "started as new interpreters" in line]
    assert f"{made.site}/" in line
    assert " mentions " in line


def test_start_files_that_only_look_as_if_they_read_the_rank(tmp_path, preload):
    made = Installation(tmp_path)
    write_program(made.site, "sitecustomize.py", "RANKING = 'WORLD'\n")
    write_program(made.site, "folder.pth", "/srv/RANK\n")
    write_program(tmp_path, "train.py", "import torch\n")
    assert preload(PYTHONPATH=str(made.site))["modules"] == ["torch"]


@pytest.mark.parametrize("words", ["--nproc 2", "--nproc 2 --preload torch"])
def test_a_file_named_like_a_module_that_torch_imports(preload, tmp_path, words):
    write_program(tmp_path, "train.py", "import torch\n")
    write_program(tmp_path, "code.py", "")  # torch does not import that one
    assert preload(words)["modules"] == ["torch"]
    file = write_program(tmp_path, "queue.py", "")
    because = f"{file} has the name of a module that torch imports"
    assert preload(words) == {"modules": [], "because": because, "excluded": []}
