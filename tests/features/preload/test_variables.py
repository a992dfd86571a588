"""Tests that variables which a program sets before its imports hold in forked ranks as in plain Python."""

import sys

import pytest

from tests.conftest import run_command, write_program

pytestmark = pytest.mark.slow

EARLY = """
    import os
    print(os.environ["OMP_NUM_THREADS"], "HF_HOME" in os.environ)
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["HF_HOME"] = "/somewhere"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    os.environ.setdefault("OMP_DYNAMIC", "false")
    import torch
    import torch.distributed as dist
    import huggingface_hub.constants
    names = "OMP_NUM_THREADS HF_HOME TOKENIZERS_PARALLELISM CUDA_VISIBLE_DEVICES TORCH_DISTRIBUTED_DEBUG OMP_DYNAMIC"
    print(torch.get_num_threads(), dist.get_debug_level(), huggingface_hub.constants.HF_HOME, torch.cuda.is_available())
    print({name: os.environ[name] for name in names.split()})
"""

CACHES = """
    import os, pathlib
    root = pathlib.Path(__file__).resolve().parent / ("cache-" + os.environ["RANK"])
    os.environ[{name!r}] = str(root)
    if {name!r} == "XDG_CACHE_HOME":
        os.environ.pop("HF_HOME", None)
    import torch, torch.hub
    import huggingface_hub.constants
    from torch._inductor.runtime import cache_dir_utils
    print(os.environ[{name!r}], torch.hub.get_dir(), huggingface_hub.constants.HF_HUB_CACHE)
    print(cache_dir_utils.cache_dir(), cache_dir_utils.triton_cache_dir(0))
"""


def test_a_forked_rank_sees_what_plain_python_shows(run_ddplaunch, tmp_path):
    """Also before the program's own line, which is the first to set a variable."""
    pytest.importorskip("huggingface_hub")
    script = write_program(tmp_path, "train.py", EARLY)
    given = {"OMP_NUM_THREADS": "1"}
    expected = run_command([sys.executable, script], env=given).stdout.splitlines()
    assert expected[0] == "1 False"
    assert expected[1].startswith("2 DebugLevel.DETAIL /somewhere")
    shown = "print(open('/proc/self/cmdline').read().startswith('python train.py'))"
    write_program(tmp_path, "train.py", f"{EARLY}    {shown}\n")
    done = run_ddplaunch("run", "--nproc", "2", "train.py", env=given)
    assert done.returncode == 0, done.stderr
    lines = [*expected, "True"]
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {line}" for rank in range(2) for line in lines)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TMPDIR"])
def test_computed_folders_of_caches(run_ddplaunch, tmp_path, name):
    """Of each rank its own, as libraries read it at their import and later."""
    pytest.importorskip("huggingface_hub")
    script = write_program(tmp_path, "train.py", CACHES.format(name=name))
    (tmp_path / "cache-0").mkdir()
    (tmp_path / "cache-1").mkdir()
    plain = [run_command([sys.executable, script], env={"RANK": rank}).stdout for rank in "01"]
    assert f"{tmp_path}/cache-1" in plain[1]
    done = run_ddplaunch("run", "--nproc", "2", "train.py")
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] {line}" for rank in range(2) for line in plain[rank].splitlines()]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
