"""Tests that programs which change their imports compute the same as in plain Python."""

import os
import sys
import zipfile

import pytest

from tests.conftest import run_command, write_program

pytestmark = pytest.mark.slow

LIBRARY = {"lib/yaml.py": "WHO = 'mine'\n"}
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
    "processors": "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nimport torch\n"
    "show(torch.get_num_threads())",
}  # fmt: skip
OFTEN = ("hook", "variables, from a file")
"""The others are left to .ci/run; test_spellings.py has all forms in no time."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.ci) for n in PROGRAMS])
def test_as_in_plain_python(run_ddplaunch, tmp_path, name):
    if "datasets" in PROGRAMS[name]:
        pytest.importorskip("datasets")
    pytest.importorskip("yaml")
    for path, text in {**LIBRARY, "lib/queue.py": "from _queue import *\nWHO = 'mine'\n"}.items():
        write_program(tmp_path, path, text)
    (tmp_path / "lib" / "queue.py").write_text(
        f"WHO = 'mine'\nexec(open({os.path.dirname(os.__file__) + '/queue.py'!r}).read())\n"
    )
    write_program(tmp_path, "v.env", "OMP_NUM_THREADS=3\n")
    with zipfile.ZipFile(tmp_path / "vendor.zip", "w") as archive:
        archive.writestr("yaml.py", "WHO = 'mine'\n")
    write_program(tmp_path, "train.py", f"def show(*values): print(*values, flush=True)\n{PROGRAMS[name]}\n")
    plain = run_command([sys.executable, "train.py"], tmp_path)
    assert (plain.returncode, plain.stdout != "") == (0, True), plain.stderr
    done = run_ddplaunch("run", "--nproc", "2", "train.py")
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] {line}" for rank in range(2) for line in plain.stdout.splitlines()]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("words", [["--nproc", "2"], ["--nproc", "2", "--preload", "torch"]])
def test_a_slow_start_is_explained_once(run_ddplaunch, run_in_fork, tmp_path, words):
    write_program(tmp_path, "train.py", "import sys\nsys.meta_path.append(None)\nsys.meta_path.pop()\nimport torch\n")
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    first, second = (run_ddplaunch("run", *words, "train.py", env=state) for _ in range(2))
    note = "each rank imports torch itself because of train.py:2, which uses sys.meta_path; faster: --preload torch"
    assert first.stderr.count(note) == (1 if len(words) == 2 else 0)
    assert "imports torch itself" not in second.stderr
    shown = run_in_fork("run", "--dry-run", *words, "train.py").stdout
    assert ("torch (comes after train.py:2, which uses sys.meta_path)" in shown) is (len(words) == 2)


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
