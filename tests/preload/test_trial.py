"""What a trial makes of packages that do one thing each, in an interpreter that has these alone."""

import _ctypes
import os
import select
import subprocess
from pathlib import Path

import pytest

from ddplaunch.preload.question import Setting
from ddplaunch.preload.verdict import read
from tests.patience import patience
from tests.preload.installation import Installation, reasons

ITSELF = """
import sys
if "/itself" not in sys.path:
    sys.path.append("/itself")
    del sys.modules["itself"]
    import itself
"""

GUILTY = {
    "gets_rank": ("import os\nR = os.environ.get('RANK')", "reads RANK at import"),
    "getenv_rank": ("import os\nos.getenv('LOCAL_RANK')", "reads LOCAL_RANK at import"),
    "has_rank": ("import os\n'SLURM_PROCID' in os.environ", "reads SLURM_PROCID at import"),
    "in_function": (
        "import helper_of_rank\nhelper_of_rank.look()",
        "reads RANK at import",
    ),
    "copies": ("import os\nALL = dict(os.environ)", "has another copies.ALL in each process"),
    "keeps_pid": ("import os\nPID = os.getpid()", "has another keeps_pid.PID in each process"),
    "keeps_time": ("import time\nSTART = [time.time()]", "has another keeps_time.START in each process"),
    "keeps_id": (
        "import uuid\nclass A:\n  def f(self, a=uuid.uuid4().hex): pass",
        "has another keeps_id.A in each process",
    ),
    "temporary": ("import tempfile\nD = tempfile.TemporaryDirectory()", "makes a temporary folder at import"),
    "writes": ("import os\nopen(os.path.join(os.path.dirname(__file__), 'log'), 'w')", None),
    "thread": (
        "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
        "starts a thread at import",
    ),
    "connects": ("import socket\nsocket.socket(2, 2).connect(('127.0.0.1', 9))", "opens a connection at import"),
    "starts": ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])", "starts python at import"),
    "sets": ("import os\nos.environ.setdefault('OMP_STACKSIZE', '1m')", "sets the variable OMP_STACKSIZE at import"),
    "sets_own": ("import os\nos.environ['MINE'] = str(os.getpid())", "changes $MINE at import"),
    "changes": ("import os\nos.environ['PATH'] += ':/nowhere'", "changes the variable PATH at import"),
    "sets_theirs": ("import os\nos.environ.setdefault('FAKE_HOME', '1')", None),
    "handles": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "handles a signal at import"),
    "excepts": ("import sys\nsys.excepthook = lambda *a: None", "changes sys.excepthook at import"),
    "path": ("import sys\nsys.path.append('/nowhere')", "changes sys.path at import"),
    "random_seed": ("import random\nrandom.random()", "moves Python's random state at import"),
    "loud": ("print('hello')", "prints at import"),
    "mask": ("import os\nos.umask(0o77)", "changes the umask at import"),
    "lock": ("import multiprocessing as m\nL = m.Lock()", "makes a lock that forks share at import"),
    "deep": ("import sys\nsys.setrecursionlimit(5000)", "changes the recursion limit at import"),
    "opens": ("import os\nF = os.open('/dev/null', os.O_RDONLY)", "leaves /dev/null open at import"),
    "logs": ("import logging\nlogging.basicConfig(level=10)", "sets up logging at import"),
    "first_finder": ("import sys\nsys.meta_path.insert(0, type('F', (), {'find_spec': lambda *a: None})())", None),
    "mapped": ("import mmap\nM = mmap.mmap(-1, 4096)", "makes memory that forks share at import"),
    "itself": (ITSELF, "changes sys.path at import"),
    "imports_path": ("import path", "imports path, which changes sys.path at import"),
    "reads_home": ("import os\nH = os.environ.get('FAKE_HOME')", "reads FAKE_HOME at import, which the program sets"),
}

LAZY = """
def __getattr__(name):
    if name != "f":
        raise AttributeError
    import lazy_part
    globals()[name] = lazy_part.f
    return lazy_part.f
"""

CLEAN = {
    "plain": "import os\nX = [1, {'a': (2.5, 'x')}]\nclass A:\n  y = 1",
    "all_variables": "import os\nN = sum(name.startswith('FOO') for name, value in os.environ.items())",
    "at_fork": "import os\nos.register_at_fork(after_in_child=lambda: None)",
    "follows_pid": "import os\ndef f():\n  global PID\n  PID = os.getpid()\nf()\nos.register_at_fork(after_in_child=f)",
    "many_numbers": "N = list(range(1 << 12)), {n: -n for n in range(1 << 12)}",
    "at_exit": "import atexit\natexit.register(len, ())",
    "library": "from ctypes.util import find_library\nL = find_library('c')",
    "asks_platform": "import platform\nP = platform.processor()",
    "reads_mode": "import os\nM = os.environ.get('FAKE_MODE')",
    "last_finder": "import sys\nsys.meta_path.append(type('F', (), {'find_spec': lambda *a: None})())",
    "order": "S = list({'a', 'b', 'c', 'd'})\nF = list({len, print, sum, dict, int, str})\nR = repr(object())",
    "lazy": LAZY,
    "lazy_part": "def f(): pass",
    "sets_default": "import os\nos.environ.setdefault('PYTORCH_NVML_BASED_CUDA_CHECK', '1')",
    "optional": "try:\n  import absent_thing\nexcept ImportError:\n  pass",
    "ends_thread": "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\ndel t",
    "keeps_none": "def f(a=None, *, b=None): pass\nexec('def g(): pass', N := {})",
}


PRINTS = """
import os
def rank_zero_only(): pass
rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))
"""
KEEPS = "from torchmetrics.utilities.prints import rank_zero_only as r\nR = r.rank"

PARTS = {
    "helper_of_rank": {"helper_of_rank.py": "import os\ndef look(): return os.getenv('RANK')"},
    "pack": {"pack/__init__.py": "import os, pack.good, other\nos.getenv('RANK')", "pack/good.py": "", "other.py": ""},
    "torchmetrics": {
        "torchmetrics/__init__.py": "from torchmetrics.utilities.prints import rank_zero_only",
        "torchmetrics/utilities/__init__.py": "",
        "torchmetrics/utilities/prints.py": PRINTS,
    },
    "torchmetrics_kept": {"torchmetrics_kept.py": KEEPS},
}


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    made = Installation(tmp_path_factory.mktemp("installation"))
    single = {**{name: text for name, (text, _) in GUILTY.items()}, **CLEAN}
    for name, files in {**{name: {f"{name}.py": text} for name, text in single.items()}, **PARTS}.items():
        made.install(name, files)
    made.install("edited", {"edited.py": ""}, editable=True)
    (made.site / "nobodys.py").write_text("")
    return made


@pytest.fixture(scope="module")
def verdict(installation):
    settings = [Setting("FAKE_HOME", None), Setting("FAKE_MODE", "fast")]
    modules = [*GUILTY, *CLEAN, "pack", "edited", "nobodys", "lazy:f", "torchmetrics", "torchmetrics_kept"]
    return installation.trial(*modules, settings=settings, late=["absent_late"])


@pytest.mark.parametrize("name", GUILTY)
def test_a_package_that_does_more_than_make_modules_is_left_to_the_ranks(verdict, installation, name):
    expected = (
        GUILTY[name][1]
        or {
            "writes": f"writes {installation.site}/log at import",
            "sets_theirs": "sets the variable FAKE_HOME at import",
            "first_finder": "changes sys.meta_path at import",
        }[name]
    )
    assert reasons(verdict)[name] == expected
    assert name not in verdict.modules


@pytest.mark.parametrize("name", CLEAN)
def test_a_package_that_does_nothing_of_the_kind_is_imported_once(verdict, name):
    assert name in verdict.modules or name == "lazy_part"
    assert name not in reasons(verdict)


def test_what_a_guilty_package_imports_is_imported_once_but_nothing_inside_it(verdict):
    assert reasons(verdict)["pack"] == "reads RANK at import"
    assert "other" in verdict.modules
    assert not [name for name in verdict.modules if name.startswith("pack")]


def test_what_can_change_unnoticed_is_left_to_the_ranks(verdict):
    assert reasons(verdict)["edited"] == "is installed in editable mode"
    assert reasons(verdict)["nobodys"] == "belongs to no installed distribution"


def test_a_repaired_library_is_imported_once_but_not_what_copies_from_it(verdict):
    assert "torchmetrics" in verdict.modules
    assert reasons(verdict)["torchmetrics_kept"] == "has another torchmetrics_kept.R in each process"


def test_the_order_is_the_programs(verdict):
    assert verdict.modules[0] == "torch"
    theirs = [name for name in verdict.modules if name in CLEAN and name != "lazy_part"]
    assert theirs == [name for name in CLEAN if name in theirs]


def test_names_that_were_looked_for_in_vain_are_known(verdict):
    assert {"absent_thing", "plain", "torch"} <= verdict.names
    assert "absent_late" not in verdict.names  # which ranks look for
    assert verdict.tried == {"absent_late"}


def test_what_cannot_be_imported_by_itself_is_left_to_the_ranks(tmp_path):
    made = Installation(tmp_path)
    made.install("first", {"first.py": "import os, second\nos.getenv('RANK')"})
    made.install("second", {"second.py": "import sys\nassert 'first' in sys.modules"})
    found = made.trial("first")
    assert found.modules == ("torch",)
    assert reasons(found) == {"first": "reads RANK at import"}


def test_a_program_that_sets_unseen_variables_shares_nothing_that_reads_any(tmp_path):
    made = Installation(tmp_path)
    made.install("reads", {"reads.py": "import os\nos.getenv('ANY')"})
    made.install("reads_not", {"reads_not.py": "import os\nos.getenv('HOME')"})
    found = made.trial("reads", "reads_not", unseen=True)
    assert found.modules == ("torch", "reads_not")
    assert reasons(found) == {"reads": "reads ANY at import, which the program sets"}


def test_a_program_that_seeds_nothing_before_its_imports_shares_what_draws(tmp_path):
    made = Installation(tmp_path)
    made.install("draws", {"draws.py": "import random\nrandom.random()"})
    made.install("draws_late", {"draws_late.py": "import random\nrandom.random()"})
    found = made.trial("draws", late=["draws_late"], seeds_first=False)
    assert found.modules == ("torch", "draws")
    assert reasons(found) == {"draws_late": "moves Python's random state at import"}


def test_a_program_whose_import_ends_it_shares_torch_alone(tmp_path):
    made = Installation(tmp_path)
    made.install("ends", {"ends.py": "import os\nos._exit(3)"})
    folder = made.asked("ends")
    assert (
        subprocess.run(made.command(folder), env=made.environment(), capture_output=True, check=False).returncode == 0
    )
    found = read(str(folder / "verdict.json"))
    assert found.modules == ("torch",)
    assert reasons(found) == {"the program": "its imports do not end when they are tried"}


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (b"\0getenv\0 NATIVE_HOME ", "may read NATIVE_HOME in native code at import"),
        (b"\0getenv\0RANK\0", "may read RANK in native code at import"),
        (b"\0getenv\0RANKING\0", None),
    ],
)
def test_native_code_that_may_read_a_variable_is_left_to_the_ranks(tmp_path, inside, reason):
    made = Installation(tmp_path)
    made.install(
        "native", {"native.py": "import ctypes, os\nctypes.CDLL(os.path.dirname(__file__) + '/native_lib.so')"}
    )
    library = Path(_ctypes.__file__).read_bytes()
    (made.site / "native_lib.so").write_bytes(library.replace(b"getenv\0", b"nothing") + inside)
    found = made.trial("native", settings=[Setting("NATIVE_HOME", None)])
    assert reasons(found).get("native") == reason


def test_a_probe_that_is_killed_says_nothing(tmp_path):
    made = Installation(tmp_path)
    made.install("dies", {"dies.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"})
    folder = made.asked("dies")
    assert (
        subprocess.run(made.command(folder), env=made.environment(), capture_output=True, check=False).returncode == 1
    )
    assert sorted(os.listdir(folder)) == ["question.json", "trial.lock"]


def test_a_program_that_imports_gevent_shares_torch_alone(tmp_path):
    found = Installation(tmp_path).trial("gevent.monkey")
    assert found.modules == ("torch",)
    assert reasons(found) == {"gevent": "must be imported before all others"}


@pytest.fixture
def waiting(tmp_path):
    """A trial in the midst of an import, and the FIFO that this import waits for."""
    made = Installation(tmp_path)
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    for path in (begun, gate):
        os.mkfifo(path)
    made.install("waits", {"waits.py": f"open({str(begun)!r}, 'w').close()\nopen({str(gate)!r}).read()"})
    folder = made.asked("waits")
    trial = subprocess.Popen(made.command(folder), env=made.environment(), start_new_session=True)
    begun.read_text()
    yield made, folder, trial, gate
    trial.kill()
    trial.wait()


def test_a_killed_trial_leaves_no_process_and_no_verdict(waiting):
    _, folder, trial, gate = waiting
    writer = os.open(gate, os.O_WRONLY)  # the import is there
    trial.kill()
    trial.wait(timeout=patience(10))
    poll = select.poll()
    poll.register(writer, select.POLLERR)
    assert poll.poll(patience(10) * 1000), "the import goes on"
    os.close(writer)
    assert not (folder / "verdict.json").exists()


def test_a_second_trial_in_one_cache_ends_at_once(waiting):
    made, folder, _, _ = waiting
    second = subprocess.run(made.command(folder), env=made.environment(), timeout=patience(30), check=False)
    assert second.returncode == 0
    assert not (folder / "verdict.json").exists()
