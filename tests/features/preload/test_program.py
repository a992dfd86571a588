"""Tests of what the source scan finds of a program's imports and variables, without running it."""

import os
from pathlib import Path

import pytest

from ddplaunch.features.preload.program_source import ProgramSource, read_program
from ddplaunch.features.preload.statements import CHANGES, Assignment, Barrier, Certainty, Import, SideEffect, Use
from ddplaunch.system.target.target import Target, TargetKind, find_target
from tests.conftest import write_program


def program(folder: Path, source: str, typed: str = "train.py", *, as_module: bool = False) -> ProgramSource:
    write_program(folder, "train.py", source)
    return read_program(find_target(typed, (), as_module=as_module, as_program=False, cwd=str(folder)))


def statements(found: ProgramSource) -> list[Import]:
    return [each for each in found.steps if isinstance(each, Import)]


def modules(found: ProgramSource, reach: Certainty = Certainty.IN_BLOCK) -> list[str]:
    return [each.module for each in statements(found) if each.certainty >= reach]


def events(found: ProgramSource, kind: type[Barrier | SideEffect]) -> list[str]:
    """Where they are, and the words of a barrier."""
    return [f"{each.where} {getattr(each, 'reason', '')}".strip() for each in found.steps if isinstance(each, kind)]


def changes(found: ProgramSource) -> set[str]:
    return {each.target for each in found.steps if isinstance(each, Use) and each.verb == CHANGES}


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
        assert {"torch", "late"} <= {each.module for each in statements(found) if each.certainty is Certainty.DEFERRED}


def test_which_statements_count(tmp_path):
    """A folder without ``__init__.py`` hides nothing installed; a file does."""
    (tmp_path / "wandb").mkdir()
    write_program(tmp_path, "local.py", "")
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
                def inner(): import seldom
        import wandb
        __import__("by_call")
        if __name__ == "__main__":
            import torch
    """
    found = program(tmp_path, source)
    assert [(each.module, each.names, each.certainty.name) for each in statements(found)] == [
        ("a.b", ("C", "d"), "CERTAIN"),
        ("everything", (), "CERTAIN"),
        ("quick", (), "IN_BLOCK"),
        ("slow", (), "IN_BLOCK"),
        ("sometimes", (), "CONDITIONAL"),
        ("in_class", (), "CERTAIN"),
        ("in_function", (), "DEFERRED"),
        ("seldom", (), "DEFERRED_CONDITIONAL"),
        ("wandb", (), "CERTAIN"),
        ("by_call", (), "CERTAIN"),
        ("torch", (), "CERTAIN"),
    ]
    assert found.imports_torch


def test_modules_of_the_program_are_scanned_and_installed_ones_are_not(tmp_path, monkeypatch):
    """Modules beside the script, in a folder that it adds to ``sys.path``, on PYTHONPATH or installed editable."""
    write_program(tmp_path, "lib/helper.py", "import of_helper\nfrom .relative import x\n")
    write_program(tmp_path, "src/mine/__init__.py", "import of_mine\nfrom . import part\n")
    write_program(tmp_path, "src/mine/part.py", "import of_part\n")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    source = """
        import os, sys
        HERE = os.path.dirname(os.path.abspath(__file__))
        sys.path.append(os.path.join(HERE, "lib"))
        import helper
        import mine
        import torch
    """
    found = program(tmp_path, source)
    assert modules(found) == ["of_helper", "of_mine", "of_part", "torch"]
    assert found.folders == (str(tmp_path / "lib"),)
    assert events(found, Barrier) == []


@pytest.mark.parametrize(
    ("source", "surely"),
    [
        ("import torch", True),
        ("import torch.nn", True),
        ("try: import torch\nexcept ImportError: torch = None", False),
        ("def main(): import torch", False),
        ("import torchvision", False),
    ],
)
def test_whether_torch_is_surely_imported(tmp_path, source, surely):
    assert program(tmp_path, source).imports_torch is surely


def settings(found: ProgramSource) -> list[tuple[str | None, str | None, bool, bool]]:
    variables = [each for each in found.steps if isinstance(each, Assignment)]
    return [(each.name, each.value, each.before_imports, each.after_torch) for each in variables]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('import os\nos.environ["A"] = "1"\nimport torch', [("A", "1", True, False)]),
        ('from os import environ\nenviron["A"] = "1"', [("A", "1", True, False)]),
        ('import os\nos.environ.update({"A": "1"}, B="2")', [("A", "1", True, False), ("B", "2", True, False)]),
        ('import os\nos.environ |= {"A": "1"}', [("A", "1", True, False)]),
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
        ('import os\nprint(os.environ["A"], os.environ.get("B"), dict(os.environ), "C" in os.environ)', []),
        ('import os, subprocess\nsubprocess.run("x", env=os.environ)\nrank = int(os.environ["RANK"])', []),
    ],
)
def test_variables_that_a_program_sets(tmp_path, source, expected):
    assert settings(program(tmp_path, source)) == expected


EFFECTS = """
'Text.'
from __future__ import annotations
import json, os, torch
def train(x: int, y: dict[str, int] = {}, *, z=(1, 'a')) -> None: print(x)
X: int = -3
X, Y = 1, {'a': [2, 3 * 4]}
try: import a
except ImportError: a = None
if TYPE_CHECKING: import a
if __name__ == '__main__': X = 1
os.environ['HF_HOME'] = '/x'
pass
print()  # effect
X = f()  # effect
X = torch.float64  # effect
@decorate
def f(): pass  # effect
def f(x=g()): pass  # effect
def f(x: g()): pass  # effect
class A: pass  # effect
if x: pass  # effect
for x in y: pass  # effect
with x: pass  # effect
try: import a
except Exception: pass  # effect
assert x  # effect
os.environ['HF_HOME'] = str(1)  # effect
X += f(1)  # effect
""".lstrip()


def test_which_statements_have_an_effect(tmp_path):
    expected = [f"train.py:{n}" for n, line in enumerate(EFFECTS.splitlines(), 1) if line.endswith("# effect")]
    assert events(program(tmp_path, EFFECTS), SideEffect) == expected


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("import fa\nfa.flag = 2", "fa.flag"),
        ("import builtins\nbuiltins.profile = len", "builtins.profile"),
        ("from transformers import Trainer\ndef f():\n  Trainer.log = print", "transformers.Trainer.log"),
        ("import a.b as c\nc.TABLE['x'] += 1", "a.b.TABLE"),
        ("import a\nb = a.c\nb.d = 1", "a.c.d"),
        ("import a\nb = a\nb.d = 1", "a.d"),
        ("import a\nx, a.b = 1, 2", "a.b"),
        ("import a\ndel a.b", "a.b"),
        ("import a\nsetattr(a.B, 'c', 1)", "a.B"),
        ("import a\ngetattr(a, 'b').c = 1", "a.b.c"),
        ("import a\nvars(a)['b'] = 1", "a.__dict__"),
        ("import importlib\nimportlib.import_module('a').b = 1", "a.b"),
    ],
)
def test_objects_of_other_modules_that_a_program_changes(tmp_path, source, target):
    assert changes(program(tmp_path, source)) == {target}


@pytest.mark.parametrize(
    "source",
    [
        "class A: pass\na = A()\na.b = 1\nA.c = 2",
        "def f(self, x):\n  self.a = 1\n  x.b = 2",
        "import local\nlocal.flag = 1\nfrom local import Thing\nThing.x = 1",
        "import decimal\ndecimal.getcontext().prec = 5",
        "import os\nos.environ['A'] = '1'",
        "import sys\nprint(sys.modules.get('x'), sys.path[0])",
    ],
)
def test_changes_to_own_objects_do_not_count(tmp_path, source):
    write_program(tmp_path, "local.py", "class Thing: pass\n")
    assert changes(program(tmp_path, source)) == set()


@pytest.mark.parametrize(
    ("source", "doubt"),
    [
        (
            "import sys\nsys.path.insert(0, sys.argv[1])",
            "train.py:2 adds a folder to sys.path that its source does not show",
        ),
        ("import sys\nsys.path[:0] = ['lib']", "train.py:2 changes sys.path"),
        ("import sys\nsys.path.remove('x')", "train.py:2 changes sys.path"),
        ("import site\nsite.addsitedir('lib')", "train.py:2 calls addsitedir"),
        ("exec(open('x').read())", "train.py:1 calls exec"),
        ("def f(x):\n  return eval(x)", "train.py:2 calls eval"),
        (
            "import importlib, sys\nimportlib.import_module(sys.argv[1])",
            "train.py:2 imports a module that its source does not show",
        ),
        ("import runpy\nrunpy.run_path('x.py')", "train.py:2 runs another file"),
        ("from unittest import mock\nwith mock.patch('os.getpid'): pass", "train.py:2 calls mock.patch"),
        ("from unittest.mock import patch\n@patch.object(A, 'b')\ndef f(): pass", "train.py:2 calls mock.patch"),
        ("import sys\nf(sys)", "train.py:2 passes on sys"),
        ("import functools\nf(functools)", None),
        ("import broken", "broken.py:1 cannot be read"),
        (f"X = {' + '.join('1' * 1500)}", "train.py:1 cannot be read"),
        ("import sys\nsys.path.append('lib')\nsys.path += ['x']\nsys.path.insert(0, '.')\nmodel.eval()", None),
    ],
)
def test_statements_whose_effect_the_source_does_not_show(tmp_path, source, doubt):
    write_program(tmp_path, "broken.py", "def (")
    found = program(tmp_path, source)
    assert events(found, Barrier) == ([doubt] if doubt else [])


@pytest.mark.parametrize(
    ("expression", "path"),
    [
        ("'lib'", "{cwd}/lib"),
        ("os.path.dirname(__file__)", "{here}"),
        ("os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')", "{here}/.."),
        ("str(Path(__file__).parent / 'lib')", "{here}/lib"),
        ("str(Path(__file__).resolve().parents[1])", "{here}/.."),
        ("os.getcwd()", "{cwd}"),
        ("ROOT", "{here}/src"),
        ("os.path.join(ROOT, sys.argv[1])", None),
        ("f'{ROOT}/x'", None),
        ("TWICE", None),
    ],
)
def test_folders_that_can_be_read(tmp_path, expression, path):
    source = f"""
        import os, sys
        from pathlib import Path
        ROOT = os.path.join(os.path.dirname(__file__), "src")
        TWICE = "a"
        TWICE = "b"
        sys.path.append({expression})
    """
    found = program(tmp_path, source)
    expected = path and os.path.normpath(path.format(cwd=os.getcwd(), here=tmp_path))
    assert found.folders == ((expected,) if expected else ())


def test_without_source():
    assert read_program(Target(TargetKind.MODULE, "compiled", sys_path_0="/x")) == ProgramSource()


def test_a_program_too_large_to_be_read(tmp_path):
    write_program(tmp_path, "tables.py", "x = 1\n" * 100_000)
    write_program(tmp_path, "model.py", "import torch\ntorch.optim.SGD\n")
    found = program(tmp_path, "import tables, model\n")
    assert events(found, Barrier) == ["tables.py:1 is too large to be scanned"]
    assert found.dynamo


def test_a_file_read_for_a_function_is_read_again_for_an_import(tmp_path):
    write_program(tmp_path, "model.py", "import torch\n")
    found = program(tmp_path, "def f():\n  import model\nimport model\n")
    assert [(each.module, each.certainty.name) for each in statements(found)] == [
        ("torch", "DEFERRED"),
        ("torch", "CERTAIN"),
    ]
