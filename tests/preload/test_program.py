"""What a program's source says of its imports and variables, without any of it being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.preload.program import Program, read
from ddplaunch.preload.question import Setting, Statement
from ddplaunch.target.target import Kind, Target, find
from tests.conftest import write


def program(folder: Path, source: str, typed: str = "train.py", *, as_module: bool = False) -> Program:
    write(folder, "train.py", source)
    return read(find(typed, (), as_module=as_module, as_program=False, cwd=str(folder)))


def modules(found: Program) -> list[str]:
    return [each.module for each in found.statements]


@pytest.mark.parametrize(
    ("source", "dynamo"),
    [
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", True),
        ("import torch\noptimizer = torch.optim.SGD([])\n", True),
        ("from torch import optim\n", True),
        ("import torch\nmodel = torch.compile(model)\n", True),
        ("model.compile()\n", True),
        ("import lightning as L\n", True),
        ("from transformers import Trainer\n", True),
        ("from torch.distributed.fsdp import fully_shard\n", True),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", False),
        ("print('optimal', 'compiled', re_compile())\n", False),
        ("", False),
    ],
)
def test_what_needs_dynamo(tmp_path: Path, source: str, dynamo: bool):
    assert program(tmp_path, source).dynamo is dynamo


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose optimizer is two imports away, by a relative one."""
    write(tmp_path, "package/__init__.py", "import first\n")
    write(tmp_path, "package/loop.py", "import second\ndef run():\n    from .deep.step import step\n    import never\n")
    write(tmp_path, "package/deep/__init__.py", "")
    write(tmp_path, "package/deep/step.py", "import torch\nstep = torch.optim.SGD\n")
    write(tmp_path, "package/__main__.py", "from .loop import run\nimport third\n")
    write(tmp_path, "unrelated.py", "import torch.optim\n")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "as_module", "expected"),
    [
        ("train.py", False, ["before", "first", "second", "after"]),
        ("train:main", False, ["before", "first", "second", "after"]),
        ("train", True, ["before", "first", "second", "after"]),
        ("package", True, ["first", "second", "third"]),
        ("package.loop", True, ["first", "second"]),
        ("package.deep.step", True, ["first", "torch"]),
    ],
)
def test_imports_come_in_the_order_in_which_they_would_run(project: Path, typed: str, as_module: bool, expected):
    """Those of local modules where these are imported; not those in functions, which still show what is used."""
    source = "import os, before\nfrom package import loop\nimport after\ndef main(): pass\n"
    found = program(project, source, typed, as_module=as_module)
    assert modules(found) == expected
    assert found.dynamo


def test_which_statements_count(tmp_path: Path):
    """A folder without ``__init__.py`` hides nothing installed; a file does."""
    (tmp_path / "wandb").mkdir()
    write(tmp_path, "local.py", "")
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
        import wandb
        if __name__ == "__main__":
            import torch
    """
    found = program(tmp_path, source)
    assert found.statements == (
        Statement("a.b", ("C", "d")),
        *(Statement(name) for name in ("everything", "quick", "slow", "in_class", "wandb", "torch")),
    )
    assert found.imports_torch


@pytest.mark.parametrize(
    ("source", "surely"),
    [
        ("import torch", True),
        ("from torch import nn", True),
        ("import torch.nn", True),
        ("try: import torch\nexcept ImportError: torch = None", False),
        ("def main(): import torch", False),
        ("import torchvision", False),
    ],
)
def test_whether_torch_is_surely_imported(tmp_path: Path, source: str, surely: bool):
    assert program(tmp_path, source).imports_torch is surely


def settings(found: Program) -> list[tuple[str | None, str | None, bool, bool]]:
    return [(each.name, each.value, each.early, each.after) for each in found.variables]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('import os\nos.environ["A"] = "1"\nimport torch', [("A", "1", True, False)]),
        ('from os import environ\nenviron["A"] = "1"', [("A", "1", True, False)]),
        ('import os\nos.environ.update({"A": "1"}, B="2")', [("A", "1", True, False), ("B", "2", True, False)]),
        ('import os\nos.environ |= {"A": "1"}', [("A", "1", True, False)]),
        ('import os\nos.environ["A"] = str(1)', [("A", None, True, False)]),
        ('import os\nif os.name: os.environ["A"] = "1"', [("A", None, False, False)]),
        ('import os\ndef main(): os.environ["A"] = "1"\nimport torch', [("A", None, False, False)]),
        ('import os, torch\ndef main(): os.environ["A"] = "1"', [("A", None, False, True)]),
        ('import os, numpy\nos.environ["A"] = "1"\nimport torch', [("A", "1", False, False)]),
        ('import os, torch\nos.environ["A"] = "1"', [("A", "1", False, True)]),
        ('import os\nfor name in "AB": os.environ[name] = "1"', [(None, None, False, False)]),
        ('import os\nos.putenv("A", "1")', [("A", None, True, False)]),
        ('import os\ndel os.environ["A"]', [("A", None, True, False)]),
        ('import os\nos.environ.pop("A", None)', [("A", None, True, False)]),
        ("from dotenv import load_dotenv\nload_dotenv()", [(None, None, False, False)]),
        ("import os\nenv = os.environ", [(None, None, True, False)]),
        ("import os\nset_all(os.environ)", [(None, None, True, False)]),
        ('import os\nprint(os.environ["A"], os.environ.get("B"), dict(os.environ), "C" in os.environ)', []),
        ('import os, subprocess\nsubprocess.run("x", env=os.environ)\nrank = int(os.environ["RANK"])', []),
    ],
)
def test_variables_that_it_sets(tmp_path: Path, source: str, expected):
    assert settings(program(tmp_path, source)) == expected


def test_a_default_counts_only_where_nothing_is_set(tmp_path: Path):
    found = program(tmp_path, 'import os\nos.environ.setdefault("A", "1")\nos.environ["B"] = "2"\n')
    assert found.question({"A", "B"}).settings == (Setting("B", "2"),)
    assert found.question(()).settings == (Setting("A", "1"), Setting("B", "2"))


def test_the_question_always_has_torch(tmp_path: Path):
    question = program(tmp_path, "import lightning, os\nenv = os.environ\n").question(())
    assert [each.module for each in question.statements] == ["torch", "lightning", "torch._dynamo"]
    assert question.sets_unseen


@pytest.mark.parametrize(
    ("source", "doubt"),
    [
        ("import sys\nsys.path.insert(0, 'lib')", "train.py:2 changes sys.path"),
        ("import sys\nsys.path[:0] = ['lib']", "train.py:2 changes sys.path"),
        ("import sys\ndef main():\n  sys.meta_path.append(1)", None),
        ("import sys\nsys.meta_path.insert(0, 1)", "train.py:2 changes sys.meta_path"),
        ("import sys\nsys.modules['numpy'] = None", "train.py:2 changes sys.modules"),
        ("import site\nsite.addsitedir('lib')", "train.py:2 calls addsitedir"),
        ("import importlib, os\nimportlib.reload(os)", "train.py:2 calls reload"),
        ("def main():\n  from gevent import monkey", "train.py:2 imports gevent, which patches the standard library"),
        ("import sys\nsys.path.append('lib')\nsys.path += ['x']\nprint(sys.modules.get('x'), sys.path[0])", None),
    ],
)
def test_doubts(tmp_path: Path, source: str, doubt: str | None):
    assert program(tmp_path, source).doubt == doubt


def test_a_doubt_in_a_local_module_is_one_of_the_program(tmp_path: Path):
    write(tmp_path, "lib/paths.py", "import sys\nsys.path.insert(0, '')\n")
    assert program(tmp_path, "def main(): from lib import paths\n").doubt == "lib/paths.py:2 changes sys.path"


def test_without_source():
    assert read(Target(Kind.MODULE, "compiled", first="/x")) == Program()


def test_a_program_too_large_to_be_read(tmp_path: Path):
    write(tmp_path, "tables.py", "x = 1\n" * 100_000)
    write(tmp_path, "model.py", "import torch\ntorch.optim.SGD\n")
    found = program(tmp_path, "import tables, model\n")
    assert (found.doubt, found.dynamo) == ("its modules have more source than is read at once", True)


@pytest.mark.parametrize(
    ("source", "seeds_first"),
    [
        ("import torch\nimport random\nrandom.seed(0)\n", False),
        ("import random\nrandom.seed(0)\nimport torch\n", True),
        ("import lightning as L\nL.seed_everything(7)\nimport torchmetrics\n", True),
        ("import torch\ntry:\n    torch.manual_seed(1)\nfinally:\n    pass\nimport numpy\n", True),
        ("import torch\ndef main():\n    torch.manual_seed(1)\n    import numpy\nmain()\n", False),
        ("import model\nimport torch\n", True),
    ],
)
def test_whether_it_seeds_before_its_imports_are_done(tmp_path: Path, source: str, seeds_first: bool):
    write(tmp_path, "model.py", "import random\nrandom.setstate(STATE)\n")
    assert program(tmp_path, source).seeds_first is seeds_first
