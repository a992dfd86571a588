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
        write_program(more, f"{name}.py", "")
    imports = "".join(f"import {name}\n" for name in ("torch", *names, "yaml"))
    write_program(tmp_path, "train.py", imports)
    found = preload(PYTHONPATH=str(more))
    assert (found["modules"], found["because"]) == (["torch", "yaml"], None)
    assert found["excluded"] == [[name, "not in the table"] for name in names]
    text = run_in_fork("run", "--dry-run", "--nproc", "2", "train.py", env={"PYTHONPATH": str(more)}).stdout
    assert "preloaded: torch, yaml (imported once for all ranks)\n" in text
    assert "note: imported in each rank: unknown0 (not in the table), unknown1 (not in the table)" in text
    assert "and 2 more\n" in text


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


def test_a_variable_of_torch_with_a_value_that_the_source_does_not_show_is_named(preload, tmp_path):
    write_program(tmp_path, "train.py", "import os; os.environ['OMP_NUM_THREADS'] = str(1 + 1)\nimport torch, yaml\n")
    found = preload("--nproc 2")
    assert (found["modules"], found["because"]) == ([], "train.py:1, which sets OMP_NUM_THREADS")


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
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", "", ["torch"]),
        ("import os\nos.environ['OMP_NUM_THREADS'] = str(2)\nimport torch\n", "", []),
        ("import os\nos.environ['HF_HOME'] = '/x'\nimport torch\n", "", ["torch"]),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '2'\n", "", ["torch"]),
    ],
)
def test_one_rank_is_forked_only_if_it_imports_torch(preload, tmp_path, source, words, modules):
    write_program(tmp_path, "train.py", source)
    assert preload(f"--nproc 1 {words}")["modules"] == modules


def test_nothing_is_preloaded_for_a_program_that_changes_all_loaded_libraries(preload, tmp_path):
    write_program(tmp_path, "train.py", "import torch\nfrom threadpoolctl import threadpool_limits\n")
    because = "threadpoolctl, which changes all libraries that are loaded"
    assert preload("--nproc 2") == {"modules": [], "because": because, "excluded": []}


READS_RANK = "import os\nMAIN = os.environ.get('RANK', '0') == '0'\n"
FINDS_FOLDERS = """
import os, site, sys
if "EBPYTHONPREFIXES" in os.environ:
    version = ".".join(map(str, sys.version_info[:2]))
    for prefix in os.environ["EBPYTHONPREFIXES"].split(os.pathsep):
        folder = os.path.join(prefix, "lib", "python" + version, "site-packages")
        if os.path.isdir(folder) and folder not in sys.path:
            site.addsitedir(folder)
    sys.path = [each for each in sys.path if each]
"""
NAMESPACE = (
    "import sys, types, os;has_mfs = sys.version_info > (3, 5);p = os.path.join(sys._getframe(1).f_locals['sitedir'], "
    "*('google',));importlib = has_mfs and __import__('importlib.util')"
)

MAY_DIFFER = [
    {"sitecustomize.py": READS_RANK},
    {"sitecustomize/__init__.py": "from . import boot", "sitecustomize/boot.py": "import os"},
    {"hook.pth": "import os; os.environ.get('LOCAL_RANK')\n"},
    {"hook.pth": "import hook_of_rank\n", "hook_of_rank.py": ""},
    *(
        {"sitecustomize.py": code}
        for code in (
            "import random\nrandom.seed(42)",
            "CONFIG = open(__file__).read()",
            "import os\nVARIABLES = dict(os.environ)",
            "import os\nfor name in ['RA' + 'NK']: os.environ.get(name)",
            "import os\nos.environ.get(key='RANK')",
            "import os\nos.environ['A'] = '1'",
            "import os\nvariables = os.environ\nvariables.clear()",
            "import os as site",
            "import os\nos = os.sep",
            "import sys\nsys.excepthook = print",
            "import sys\nsys.stderr = None",
            "eval('1')",
            "class A: pass",
        )
    ),
]
"""Files in site-packages that may do something else in each rank."""


@pytest.mark.parametrize("files", MAY_DIFFER, ids=lambda files: next(iter(files.values()))[:40])
def test_start_files_that_may_differ_prevent_forking(tmp_path, preload, files):
    site = Installation(tmp_path).site
    for name, text in files.items():
        write_program(site, name, text)
    write_program(tmp_path, "train.py", "import torch\n")
    planned = preload(PYTHONPATH=str(site))
    assert planned["modules"] == []
    assert planned["because"].startswith(f"{site}/")
    why = "mentions RANK" if READS_RANK in files.values() else ""
    assert why in planned["because"]


def test_a_start_file_that_seeds_has_its_effect_in_each_rank(tmp_path):
    made = Installation(tmp_path)
    write_program(made.site, "sitecustomize.py", "import random\nrandom.seed(42)\n")
    write_program(tmp_path, "train.py", "import random, torch\nprint(random.random())\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert sorted(done.stdout.split()) == ["0.6394267984578837"] * 2 + ["[0]", "[1]"], done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "started as new interpreters" in line]
    assert "sitecustomize.py runs code when Python starts, which may do something else in each rank" in line


@pytest.mark.parametrize("code", ["# RANKING\n", FINDS_FOLDERS], ids=["comment", "folders"])
def test_start_files_that_are_the_same_in_each_rank(tmp_path, preload, code):
    made = Installation(tmp_path)
    write_program(made.site, "sitecustomize.py", code)
    write_program(made.site, "folder.pth", f"/srv/RANK\n{NAMESPACE}\nimport _virtualenv\nimport _vllm_editable\n")
    write_program(tmp_path, "train.py", "import torch\n")
    assert preload(PYTHONPATH=str(made.site))["modules"] == ["torch"]
