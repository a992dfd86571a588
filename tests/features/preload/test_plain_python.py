"""Tests that programs which change their imports compute the same as in plain Python."""

import os
import sys
import zipfile

import pytest

from tests.conftest import run_command, write_program
from tests.features.preload.table import TORCH, Installation
from tests.frameworks.launchers import requires

pytestmark = pytest.mark.slow

SMALL_TORCH = f"""
import logging, os, queue
from torch import nn

{TORCH}
logging.getLogger("torch.of_its_import")
threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))

def get_num_threads():
    return threads
"""
"""Keeps what it finds at its import, as torch does, and takes no time."""

WHO = "import yaml\nshow(getattr(yaml, 'WHO', 'installed'))"
CACHE = "import datasets\nshow(datasets.config.HF_DATASETS_CACHE)"
FINDER = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        seen.append(name)
seen = []
"""

PROGRAMS = {
    "hook": f"import sys\n{FINDER}\nsys.meta_path.insert(0, Finder())\nimport torch\nshow('torch.nn' in seen)",
    "loggers": "import logging.config\nlogging.config.dictConfig({'version': 1})\nimport torch\nimport logging\n"
    "show([n for n, l in logging.root.manager.loggerDict.items() if getattr(l, 'disabled', False)])",
    "path, before torch": "import os, sys\nsys.path.insert(0, os.environ.get('SRC', 'lib'))\n"
    "import queue, torch\nshow(getattr(queue, 'WHO', 'installed'))",
    "path, an archive": "import os, sys, torch\nHERE = os.path.dirname(os.path.abspath(__file__))\n"
    f"sys.path.insert(0, os.path.join(HERE, 'vendor.zip'))\n{WHO}",
    "variables, from a file": "import os\nfor line in open('v.env'):\n  name, value = line.split('=')\n"
    "  os.environ[name] = value\nimport torch\nshow(torch.get_num_threads())",
    "variable, default argument": "import os, torch\ndef f(e=os.environ):\n"
    f"  e['HF_DATASETS_CACHE'] = '/tmp/elsewhere'\nf()\n{CACHE}",
}  # fmt: skip


@pytest.fixture
def installed(tmp_path):
    """Packages as programs expect them, known by a table: a small torch, yaml and datasets."""
    found = Installation(tmp_path)
    found.add("torch", SMALL_TORCH, modules={"torch": [], "torch.nn": []})
    found.add("yaml")
    config = "import os\nHF_DATASETS_CACHE = os.environ.get('HF_DATASETS_CACHE')"
    modules = {"datasets": [], "datasets.config": []}
    found.add("datasets", "import datasets.config", modules=modules)
    write_program(found.site, "datasets/config.py", config)
    return found


@pytest.mark.parametrize(
    "packages", ["small", pytest.param("real", marks=[pytest.mark.ci, requires("datasets", "yaml")])]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_output_equals_that_of_plain_python(run_ddplaunch, installed, tmp_path, name, packages):
    write_program(tmp_path, "lib/yaml.py", "WHO = 'mine'\n")
    queue = os.path.dirname(os.__file__) + "/queue.py"
    write_program(tmp_path, "lib/queue.py", f"WHO = 'mine'\nexec(open({queue!r}).read())\n")
    write_program(tmp_path, "v.env", "OMP_NUM_THREADS=3\n")
    with zipfile.ZipFile(tmp_path / "vendor.zip", "w") as archive:
        archive.writestr("yaml.py", "WHO = 'mine'\n")
    write_program(tmp_path, "train.py", f"def show(*values): print(*values, flush=True)\n{PROGRAMS[name]}\n")
    if packages == "real":  # a single rank, as many of them import torch
        plain = run_command([sys.executable, "train.py"], tmp_path)
        done = run_ddplaunch("run", "--nproc", "1", "--start", "zygote", "train.py")
        prefixes = [""]
    else:
        plain = run_command([sys.executable, "train.py"], tmp_path, {"PYTHONPATH": str(installed.site)})
        done = installed.run(tmp_path, "run", "--nproc", "2", "train.py")
        prefixes = ["[0] ", "[1] "]
    assert (plain.returncode, plain.stdout != "") == (0, True), plain.stderr
    assert done.returncode == 0, done.stderr
    expected = [f"{prefix}{line}" for prefix in prefixes for line in plain.stdout.splitlines()]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.ci
def test_a_slow_start_is_explained_once(installed, tmp_path):
    write_program(tmp_path, "train.py", "import os\nos.environ['OMP_NUM_THREADS'] = str(1)\nimport torch\n")
    because = "each rank imports torch itself because of train.py:2, which sets OMP_NUM_THREADS"
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*words):
        return installed.run(tmp_path, "run", "--nproc", "2", *words, "train.py", env=state)

    assert [run().stderr.count(f"{because}; faster: set it in the shell") for _ in range(2)] == [1, 0]
    assert "preloaded: nothing (train.py:2, which sets OMP_NUM_THREADS)" in run("--dry-run").stdout


@pytest.mark.ci
@pytest.mark.parametrize("start", ["auto", "zygote"])
def test_a_damaged_archive_gives_its_own_error(run_ddplaunch, tmp_path, start):
    with zipfile.ZipFile(tmp_path / "train.pyz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "print(1)\n" * 50)
    damaged = bytearray((tmp_path / "train.pyz").read_bytes())
    at = damaged.find(b"__main__.py") + len(b"__main__.py")
    damaged[at : at + 8] = b"\xff" * 8
    (tmp_path / "train.pyz").write_bytes(damaged)
    done = run_ddplaunch("run", "--nproc", "1", "--start", start, "train.pyz")
    assert "rank 0 failed with error: Error -3 while decompressing data" in done.stderr
    assert "bug in ddplaunch" not in done.stderr


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


@pytest.mark.ci
@requires("huggingface_hub")
def test_a_forked_rank_sees_what_plain_python_shows(run_ddplaunch, tmp_path):
    """A forked rank sees what plain Python shows, also before the line that first sets a variable."""
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


CACHES = """
    import os, pathlib
    root = pathlib.Path(__file__).resolve().parent / ("cache-" + os.environ["RANK"])
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TMPDIR"):
        os.environ[name] = str(root / name)
    import tempfile, torch, torch.hub
    from torch._inductor.runtime import cache_dir_utils
    print(tempfile.gettempdir(), torch.hub.get_dir(), cache_dir_utils.cache_dir(), cache_dir_utils.triton_cache_dir(0))
"""


@pytest.mark.ci
def test_computed_folders_of_caches(run_ddplaunch, tmp_path):
    """A cache folder that the program computes is each rank's own, at the import of torch and later."""
    script = write_program(tmp_path, "train.py", CACHES)
    for rank in "01":
        (tmp_path / f"cache-{rank}" / "TMPDIR").mkdir(parents=True)
    plain = run_command([sys.executable, script], env={"RANK": "1"}).stdout
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TMPDIR"):
        assert f"{tmp_path}/cache-1/{name}" in plain
    done = run_ddplaunch("run", "--nproc", "2", "train.py")
    assert done.returncode == 0, done.stderr
    of_first = plain.replace(f"{tmp_path}/cache-1/", f"{tmp_path}/cache-0/")
    assert sorted(done.stdout.splitlines()) == [f"[0] {of_first.strip()}", f"[1] {plain.strip()}"]
