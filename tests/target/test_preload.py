"""Whether the target's source, or what it imports from beside it, will need torch._dynamo."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddplaunch.target.preload import preloads

from ddplaunch.target.target import Kind, Target, find
from tests.conftest import write

BOTH = ("torch", "torch._dynamo")


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", BOTH),
        ("import torch\noptimizer = torch.optim.SGD([])\n", BOTH),
        ("from torch import optim\n", BOTH),
        ("import torch\nmodel = torch.compile(model)\n", BOTH),
        ("model.compile()\n", BOTH),
        ("import lightning as L\n", BOTH),
        ("from transformers import Trainer\n", BOTH),
        ("from torch.distributed.fsdp import fully_shard\n", BOTH),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", ("torch",)),
        ("print('optimal', 'compiled', re_compile())\n", ("torch",)),
        ("", ("torch",)),
    ],
)
def test_by_its_own_source(tmp_path: Path, source: str, modules: tuple[str, ...]):
    write(tmp_path, "train.py", source)
    target = find("train.py", (), as_module=False, as_program=False, cwd=str(tmp_path))
    assert preloads(target) == modules


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose optimizer is two imports away, by a relative one."""
    write(tmp_path, "train.py", "from package import loop\ndef main(): pass\n")
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/loop.py", "def run():\n    from .deep.step import step\n")
    write(tmp_path, "package/deep/__init__.py", "")
    write(tmp_path, "package/deep/step.py", "import torch\nstep = torch.optim.SGD\n")
    write(tmp_path, "unrelated.py", "import torch.optim\n")
    write(tmp_path, "plain.py", "import torch, json, os.path\nfrom package import deep\n")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "as_module", "modules"),
    [
        ("train.py", False, BOTH),
        ("train.py:main", False, BOTH),
        ("train:main", False, BOTH),
        ("train", True, BOTH),
        ("package.loop", True, BOTH),
        ("package.deep.step", True, BOTH),
        ("plain.py", False, ("torch",)),
        ("plain", True, ("torch",)),
    ],
)
def test_by_what_it_imports_from_beside_it(project: Path, typed: str, as_module: bool, modules: tuple[str, ...]):
    target = find(typed, (), as_module=as_module, as_program=False, cwd=str(project))
    assert preloads(target) == modules


def test_without_source():
    assert preloads(Target(Kind.PROGRAM, "./prog")) == ()
    assert preloads(Target(Kind.MODULE, "compiled", first="/x")) == ("torch",)
