"""Tests of what is read of a program's imports and variables, without running it: hints for the preload plan."""

from pathlib import Path

import pytest

from ddplaunch.features.preload.program_source import ProgramSource, read_program
from ddplaunch.system.target.target import Target, TargetKind, find_target
from tests.conftest import write_program


def program(folder: Path, source: str, typed: str = "train.py", *, as_module: bool = False) -> ProgramSource:
    write_program(folder, "train.py", source)
    return read_program(find_target(typed, (), as_module=as_module, as_program=False, cwd=str(folder)))


def modules(found: ProgramSource, *, is_deferred: bool = False) -> list[str]:
    return [each.module for each in found.imports if each.is_deferred == is_deferred]


@pytest.mark.parametrize(
    ("source", "dynamo"),
    [
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", True),
        ("from torch.distributed.fsdp import fully_shard\n", True),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n", True),
        ("import torch\nmodel = torch.compile(model)\n", True),
        ("model.compile()\n", True),
        ("import lightning as L\n", True),
        ("from transformers import Trainer\n", True),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", False),
        ("print('optimal', 'compiled', re_compile())\n", False),
        ("", False),
    ],
)
def test_programs_that_need_dynamo(tmp_path, source, dynamo):
    assert program(tmp_path, source).dynamo is dynamo


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose optimizer is two imports away, by a relative one."""
    write_program(tmp_path, "package/__init__.py", "import first\n")
    write_program(
        tmp_path, "package/loop.py", "import second\ndef run():\n    from .deep.step import step\n    import late\n"
    )
    write_program(tmp_path, "package/deep/__init__.py", "from ..side import x\n")
    write_program(tmp_path, "package/side.py", "import aside\n")
    write_program(tmp_path, "package/deep/step.py", "import torch\nstep = torch.optim.SGD\n")
    write_program(tmp_path, "package/__main__.py", "from .loop import run\nimport third\n")
    write_program(tmp_path, "unrelated.py", "import torch.optim\n")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "as_module", "expected"),
    [
        ("train.py", False, ["before", "first", "second", "after"]),
        ("train:main", False, ["before", "first", "second", "after"]),
        ("train", True, ["before", "first", "second", "after"]),
        ("package", True, ["first", "second", "third"]),
        ("package.loop", True, ["first", "second"]),
        ("package.deep.step", True, ["first", "aside", "torch"]),
    ],
)
def test_imports_come_in_the_order_in_which_they_would_run(project, typed, as_module, expected):
    """Imports of local modules come where these are imported, and those in functions later."""
    source = "import os, before\nfrom package import loop\nimport after\ndef main(): pass\n"
    found = program(project, source, typed, as_module=as_module)
    assert modules(found) == expected
    assert found.dynamo
    if typed != "package.deep.step":
        assert {"torch", "late"} <= {*modules(found, is_deferred=True)}


def test_which_imports_count(tmp_path):
    """A folder without ``__init__.py`` hides nothing installed; a file does."""
    (tmp_path / "wandb").mkdir()
    write_program(tmp_path, "local.py", "if __name__ == '__main__':\n    import of_its_test\n")
    source = """
        from __future__ import annotations
        import sys, json.decoder, local
        from typing import TYPE_CHECKING
        from a.b import C, d as e
        from everything import *
        if TYPE_CHECKING:
            import types_alone
        try:
            import quick
        except ImportError:
            import slow
        if sys.argv[1:]:
            import sometimes
        class Model:
            import in_class
        def main():
            import in_function
            if sys.argv:
                import seldom
        import wandb
        if __name__ == "__main__":
            import torch
    """
    found = program(tmp_path, source)
    assert [(each.module, each.names) for each in found.imports if not each.is_deferred] == [
        *(("a.b", ("C", "d")), ("everything", ()), ("quick", ()), ("slow", ()), ("in_class", ()), ("wandb", ())),
        ("torch", ()),
    ]
    assert modules(found, is_deferred=True) == ["in_function"]
    assert found.imports_torch


def test_modules_of_the_program_are_read_and_installed_ones_are_not(tmp_path, monkeypatch):
    """Modules beside the script, in a folder around it, on PYTHONPATH or installed editable."""
    write_program(tmp_path, "src/helper.py", "import of_helper\nfrom .relative import x\n")
    write_program(tmp_path, "elsewhere/mine/__init__.py", "import of_mine\nfrom . import part\n")
    write_program(tmp_path, "elsewhere/mine/part.py", "import of_part\n")
    write_program(tmp_path, "above.py", "import of_above\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    source = "import sys\nsys.path.append(f(__file__))\nimport helper, mine, above, yaml, torch\n"
    (tmp_path / "scripts").mkdir()
    found = program(tmp_path / "scripts", source)
    assert modules(found) == ["of_helper", "of_mine", "of_part", "of_above", "yaml", "torch"]


@pytest.mark.parametrize(
    ("source", "surely"),
    [
        ("import torch", True),
        ("import torch.nn", True),
        ("try: import torch\nexcept ImportError: torch = None", True),
        ("def main(): import torch", False),
        ("if x: import torch", False),
        ("import torchvision", False),
    ],
)
def test_whether_torch_is_imported_at_the_top(tmp_path, source, surely):
    assert program(tmp_path, source).imports_torch is surely


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('import os\nos.environ["A"] = "1"\nimport torch', [("A", "1", True, True)]),
        ('from os import environ\nenviron["A"] = "1"', [("A", "1", True, True)]),
        ('import os\nos.environ.update({"A": "1"}, B="2")', [("A", "1", True, True), ("B", "2", True, True)]),
        ('import os\nos.environ |= {"A": "1"}', [("A", "1", True, True)]),
        ('import os\nos.environ["A"] = str(1)', [("A", None, True, True)]),
        ('import os\nif os.name: os.environ["A"] = "1"', [("A", None, True, True)]),
        ('import os\ndef main(): os.environ["A"] = "1"\nimport torch', [("A", None, False, False)]),
        ('import os, numpy\nos.environ["A"] = "1"\nimport torch', [("A", "1", False, True)]),
        ('import os, torch\nos.environ["A"] = "1"', [("A", "1", False, False)]),
        ('import os\nprint(os.environ["A"], os.environ.get("B"), dict(os.environ), "C" in os.environ)', []),
        ('import os, subprocess\nsubprocess.run("x", env=os.environ)\nrank = int(os.environ["RANK"])', []),
    ],
)
def test_variables_that_a_program_sets(tmp_path, source, expected):
    found = program(tmp_path, source).assignments
    assert [(each.name, each.value, each.before_imports, each.before_torch) for each in found] == expected


def test_without_source():
    assert read_program(Target(TargetKind.MODULE, "compiled", sys_path_0="/x")) == ProgramSource()


@pytest.mark.parametrize("text", ["def (", "x = 1\n" * 100_000, f"X = {' + '.join('1' * 1500)}"])
def test_a_module_that_cannot_be_read_is_passed_over(tmp_path, text):
    write_program(tmp_path, "tables.py", text)
    write_program(tmp_path, "model.py", "import torch\ntorch.optim.SGD\n")
    found = program(tmp_path, "import tables, model\n")
    assert (modules(found), found.dynamo) == (["torch"], True)


def test_a_file_read_for_a_function_is_read_again_for_an_import(tmp_path):
    write_program(tmp_path, "model.py", "import torch\n")
    found = program(tmp_path, "def f():\n  import model\ndef g():\n  import model\nimport model\n")
    assert (modules(found), found.imports_torch) == (["torch"], True)
