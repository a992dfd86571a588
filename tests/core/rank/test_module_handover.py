"""A rank gets a preloaded module only if a fresh import would have the same result: each program is run by plain python
and in ranks, with everything preloaded, whatever its source shows."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.core.rank.rank_runner import load_private_module
from ddplaunch.features.preload.mismatches import PreloadMismatch, find_mismatch, remember_mismatch
from tests.conftest import read_events, run_command, wait_until, write_program

import_check = load_private_module("core/rank/import_check")
import_effects = load_private_module("core/rank/import_effects")

SETS = "exec('os.environ[\"OPENBLAS_NUM_' + 'THREADS\"] = \"3\"')"

STARTS_OVER = {  # with numpy, which has native code
    "a variable": SETS,
    "a variable set by a module's attribute": "import lazy\nlazy.batch_size",
    "a replaced function": "import time\ntime.time = lambda: 0.0",
    "a replaced function of a module that is imported first": "import functools\nreal = functools.lru_cache\n"
                                                              "functools.lru_cache = lambda *a, **k: real(*a, **k)",
    "a module in sys.modules": "sys.modules['pickle'] = type(sys)('pickle')",
    "a removed module": "import pickle\ndel sys.modules['pickle']",
    "a file that comes first": "sys.path.insert(0, 'folder')",
    "a file that is written": "os.makedirs('new', exist_ok=True)\nsys.path.insert(0, 'new')\n"
                              "compile\nopen('new/pickle.py', 'w').close()",
    "a finder": "class Finder:\n    def find_spec(self, name, path, target=None):\n        if name == 'pickle':\n"
                "            raise ImportError\nsys.meta_path.insert(0, Finder())",
    "a trace function": "sys.settrace(lambda *_: None)",
}  # fmt: skip

HANDED_OVER = {
    "nothing": "pass",
    "the main block of an imported file": "import helper",
    "a variable that no import reads": "os.environ['MINE'] = '1'",
    "a folder without such files": "sys.path.insert(0, 'empty')",
    "print": "import builtins, functools\nbuiltins.print = functools.partial(print, flush=True)",
    "an ignored warning": "import warnings\nwarnings.simplefilter('ignore')",
    "another logger": "import logging\nlogging.basicConfig(level=10)\nlogging.getLogger('mine').info('text')",
    "a working folder": "os.chdir('empty')",
}

PROGRAM = """
import os, sys
print("begins", flush=True)
print("a part", end=" ")
{before}
import numpy, hashlib
import gc, io, shutil
print(open is io.open, shutil._use_fd_functions)
print(numpy.arange(3).sum(), sys.modules["numpy"] is numpy, os.environ.get("OPENBLAS_NUM_THREADS"))
print(len(sys.modules.keys() - {{"faulthandler", "__future__"}}))
print([name for name in sys.modules if not name.startswith("_")][-5:], sorted(os.environ) == sorted(set(os.environ)))
print(gc.get_freeze_count() > 0, file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_program(tmp_path, "lazy.py", f"import os\ndef __getattr__(name):\n    {SETS}\n    return 1\n")
    write_program(tmp_path, "helper.py", f"import os\nif __name__ == '__main__':\n    {SETS}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").mkdir()
    write_program(tmp_path, "folder/pickle.py", "raise ImportError('mine')\n")
    return tmp_path


def run_both(run_ddplaunch, folder: Path, before: str, preload: str = "numpy"):
    write_program(folder, "train.py", PROGRAM.format(before=before))
    plain = run_command([sys.executable, "train.py"], cwd=folder)
    words = ("run", "--nproc", "2", "--preload", preload, "--log-dir", "logs", "--run-id", "x", "train.py")
    return plain, run_ddplaunch(*words, cwd=folder)


def lines_of(stdout: str, rank: int) -> list[str]:
    return [line[4:] for line in stdout.splitlines() if line.startswith(f"[{rank}] ")]


@pytest.mark.parametrize("case", HANDED_OVER)
def test_a_module_that_fits_is_handed_over(run_ddplaunch, folder, case):
    plain, done = run_both(run_ddplaunch, folder, HANDED_OVER[case])
    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert lines_of(done.stderr, 0).count("True") == 1, done.stderr
    for rank in range(2):
        assert lines_of(done.stdout, rank) == plain.stdout.splitlines()


def test_a_signal_handler_may_import_during_a_hand_over(run_ddplaunch, folder):
    """Not while importlib acquires a lock: until Python 3.12 that fails in plain Python, too."""
    write_program(
        folder,
        "train.py",
        """
        import signal
        def import_module(number, frame):
            if frame.f_code.co_name not in ("acquire", "release", "__enter__", "__exit__"):
                __import__("pickle")
        signal.signal(signal.SIGALRM, import_module)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        import numpy, gc, pickle
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        print(gc.get_freeze_count() > 0, pickle.loads(pickle.dumps(numpy.arange(3))).sum())
        """,
    )
    done = run_ddplaunch("run", "--nproc", "2", "--preload", "numpy", "train.py", cwd=folder)
    assert sorted(done.stdout.splitlines()) == ["[0] True 3", "[1] True 3"], done.stderr


@pytest.mark.parametrize("case", STARTS_OVER)
def test_a_rank_starts_over_if_something_differs(run_ddplaunch, folder, case):
    """What it had printed before is printed once."""
    plain, done = run_both(run_ddplaunch, folder, STARTS_OVER[case])
    assert plain.returncode == done.returncode, done.stderr
    shown = [lines_of(done.stdout, rank) for rank in range(2)]
    assert plain.stdout.splitlines() in (
        shown if plain.returncode else [each for each in shown if shown[0] == shown[1]]
    )
    assert "True" not in lines_of(done.stderr, 0)


def test_the_launcher_names_the_line_and_what_differs(run_ddplaunch, folder):
    _, done = run_both(run_ddplaunch, folder, SETS)
    note = "numpy was preloaded, and ranks cannot use it: train.py:5: OPENBLAS_NUM_THREADS is '3', not unset"
    assert done.stderr.count(f"{note}; they start over, --start exec avoids that") == 1
    events = [event for event in read_events(folder / "logs" / "x") if event["event"] == "import_mismatch"]
    found = sorted((event["rank"], event["module"], event["outcome"]) for event in events)
    assert found == [(0, "numpy", "restarts"), (1, "numpy", "restarts")]


@pytest.mark.parametrize(
    ("before", "effect"),
    [
        ("open('mine', 'a').write('x')", "has written to files"),
        ("import socket\ns = socket.socket()", "has opened connections"),
        ("import subprocess\nsubprocess.run(['true'])", "has started processes"),
    ],
)
def test_a_rank_that_cannot_start_over_ends_with_an_error(run_ddplaunch, folder, before, effect):
    _, done = run_both(run_ddplaunch, folder, f"{before}\n{SETS}")
    assert done.returncode == 2
    assert "`import numpy` does not fit the preloaded one (train.py:" in done.stderr
    assert f"OPENBLAS_NUM_THREADS is '3', not unset), and the program {effect} before" in done.stderr


def test_a_rank_in_a_call_goes_on(tmp_path):
    """It cannot start over, and its variables would be lost."""
    write_program(
        tmp_path,
        "calls.py",
        f"""
        import os
        from ddplaunch import Session
        def change():
            {SETS}
            import numpy
            return os.environ["OPENBLAS_NUM_THREADS"]
        if __name__ == "__main__":
            with Session(nproc=2, preload="numpy", show="none") as session:
                print(session.run(change), session.run(change))
        """,
    )
    done = run_command([sys.executable, "calls.py"], cwd=tmp_path)
    assert done.stdout == "['3', '3'] ['3', '3']\n", done.stderr
    assert (
        "OPENBLAS_NUM_THREADS is '3', not unset, and the program has opened connections, so they use it" in done.stderr
    )


def test_a_submodule_comes_with_its_package(run_ddplaunch, folder):
    write_program(folder, "package/__init__.py", "import package.child")
    write_program(folder, "package/child.py", "VALUE = 1\n")
    write_program(folder, "other.py", "from package.child import VALUE\n")
    write_program(
        folder,
        "train.py",
        "import other, sys\nprint([each for each in sys.modules if each.startswith('package')])\n"
        "print(sys.modules['package'].child is sys.modules['package.child'])\n",
    )
    plain = run_command([sys.executable, "train.py"], cwd=folder)
    done = run_ddplaunch("run", "--nproc", "2", "--preload", "package,other", "train.py", cwd=folder)
    assert [lines_of(done.stdout, rank) for rank in range(2)] == [plain.stdout.splitlines()] * 2, done.stderr


def test_python_code_is_imported_afresh(run_ddplaunch, folder):
    write_program(folder, "shared.py", "import os\nVALUE = os.environ.get('MINE')\nPID = os.getpid()\n")
    write_program(
        folder,
        "train.py",
        "import os\nif os.environ['RANK'] == '0': os.environ['MINE'] = '1'\n"
        "import shared\nprint(shared.VALUE, shared.PID == os.getpid())\n",
    )
    done = run_ddplaunch("run", "--nproc", "2", "--preload", "shared", "train.py", cwd=folder)
    assert sorted(done.stdout.splitlines()) == ["[0] 1 True", "[1] None False"], done.stderr


def test_a_program_that_did_not_fit_is_remembered_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program = write_program(tmp_path, "train.py", "import torch\n")
    assert find_mismatch(str(program)) is None
    remember_mismatch(str(program), PreloadMismatch("torch", "train.py:1: X is '1', not unset", had_packages=False))
    found = find_mismatch(str(program))
    assert found is not None
    assert (found.module, found.differs) == ("torch", "train.py:1: X is '1', not unset")
    write_program(tmp_path, "train.py", "import torch, sys\n")
    assert find_mismatch(str(program)) is None
    (tmp_path / "ddplaunch" / "mismatches").write_text("{")
    assert find_mismatch(str(program)) is None


@pytest.mark.ci
def test_the_next_run_of_a_program_does_not_preload_what_did_not_fit(run_ddplaunch, tmp_path):
    write_program(tmp_path, "helper.py", "import os\nexec(\"os.environ['OMP_NUM_THREADS'] = '2'\")\n")
    write_program(tmp_path, "train.py", "import os, helper\nimport torch\nprint(torch.get_num_threads())\n")
    environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    first, second = (run_ddplaunch("run", "--nproc", "2", "train.py", cwd=tmp_path, env=environment) for _ in range(2))
    assert sorted(first.stdout.splitlines()) == sorted(second.stdout.splitlines()) == ["[0] 2", "[1] 2"]
    reason = "train.py:2: OMP_NUM_THREADS is '2', not '1'"
    assert f"torch was preloaded, and ranks cannot use it: {reason}; they start over, the next run" in first.stderr
    assert f"each rank imports torch itself because of {reason} when it imports torch" in second.stderr


READS = """
import importlib.metadata, logging, os, random
PID = os.getpid()
X = {expression}
"""

READING = {
    "RANK": ("os.environ.get('RANK')", ""),
    "a file beside the working folder": ("os.path.exists('beside')", "os.chdir('folder')"),
    "a random number": ("random.random() < 2", "import random\nrandom.seed(1)"),
    "a random number of another package": ("__import__('part.inner').inner.X", "import random\nrandom.seed(1)"),
    "handlers of a logger": ("logging.getLogger('mine').hasHandlers()", "import logging\nlogging.basicConfig()"),
    "the level of a logger": ("logging.getLogger('a').isEnabledFor(20)", "import logging\nlogging.root.setLevel(10)"),
    "the class of loggers": (
        "type(logging.getLogger('new')).__name__",
        "import logging\nlogging.setLoggerClass(type('L', (logging.Logger,), {}))",
    ),
    "metadata": (
        "next((each.version for each in importlib.metadata.distributions(name='thing')), None)",
        "sys.path.insert(0, 'folder')",
    ),
}
"""What an import reads, and what the program does before."""


@pytest.mark.parametrize("what", READING)
def test_what_an_import_reads_is_compared(run_ddplaunch, folder, what):
    expression, before = READING[what]
    write_program(folder, "shared.py", READS.format(expression=expression))
    write_program(folder, "part/__init__.py", "")
    write_program(folder, "part/inner.py", "import random\nX = random.random() < 2\n")
    write_program(folder, "folder/beside", "")
    write_program(folder, "folder/thing-1.dist-info/METADATA", "Name: thing\nVersion: 1\n")
    program = "import os, sys\n{}\nimport shared, random\nprint(shared.X, {}, shared.PID == os.getpid())\n"
    shown = "random.random()" if "random" in what else "''"
    write_program(folder, "train.py", program.format(before, shown))
    done = run_ddplaunch("run", "--nproc", "2", "--preload", "shared", "train.py", cwd=folder)
    for rank in range(2):
        plain = run_command([sys.executable, "train.py"], cwd=folder, env={"RANK": str(rank)})
        assert lines_of(done.stdout, rank) == plain.stdout.splitlines(), done.stderr


_WRONG_HINTS = """
import json
import sys
from ddplaunch.features.preload import preload_plan, program_source

def read_program(target):
    imports = tuple(program_source.Import(name, (), False) for name in ("torch", "yaml", "numpy", "transformers"))
    wrong = [program_source.Assignment("?:1", name, "7", False, True, True)
             for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "HOME", "PATH")]
    return program_source.ProgramSource(imports, tuple(wrong), frozenset(), True, True)

program_source.read_program = read_program
sys.argv[0] = "ddplaunch"
from ddplaunch.cli import main
main()
"""


@pytest.mark.ci
@pytest.mark.parametrize("case", ["nothing", "a variable", "a replaced function"])
def test_wrong_hints_cost_time_only(folder, case):
    """The source of the program is said to import much, and to set variables to other values than it does."""
    before = {**HANDED_OVER, **STARTS_OVER}[case]
    write_program(folder, "train.py", PROGRAM.format(before=before))
    plain = run_command([sys.executable, "train.py"], cwd=folder)
    environment = {"XDG_STATE_HOME": str(folder / "state")}
    for _ in range(2):
        done = run_command([sys.executable, "-c", _WRONG_HINTS, "run", "--nproc", "2", "train.py"], folder, environment)
        assert done.returncode == 0, done.stderr
        assert [lines_of(done.stdout, rank) for rank in range(2)] == [plain.stdout.splitlines()] * 2


def test_the_report_has_the_ranks_that_started_over(run_ddplaunch, folder):
    write_program(folder, "train.py", PROGRAM.format(before=SETS))
    environment = {"XDG_STATE_HOME": str(folder / "state")}
    run_ddplaunch("run", "--nproc", "2", "--preload", "numpy", "train.py", cwd=folder, env=environment)
    report = run_ddplaunch("report", cwd=folder, env=environment)
    differs = "train.py:5: OPENBLAS_NUM_THREADS is '3', not unset"
    assert f"the preloaded numpy did not fit, 2 ranks started over: {differs}\n" in report.stdout, report
    found = json.loads(run_ddplaunch("report", "--json", cwd=folder, env=environment).stdout)
    expected = {"module": "numpy", "differs": differs, "outcome": "restarts", "ranks": 2}
    assert found["attempts"][0]["mismatches"] == [expected]


@pytest.mark.parametrize("command", [("stacks",), ("profile", "--seconds", "0.5")], ids=lambda words: words[0])
def test_a_rank_that_was_inspected_still_starts_over(start_ddplaunch, run_in_fork, tmp_path, command):
    """What the rank writes for that goes to files of ddplaunch; only the program's own writes forbid a second start."""
    gate = "while not os.path.exists('go'): time.sleep(0.01)"
    show = "print(os.environ['OPENBLAS_NUM_THREADS'])"
    write_program(tmp_path, "train.py", f"import os, time\n{gate}\n{SETS}\nimport numpy\n{show}")
    job = start_ddplaunch("run", "--nproc", "1", "--preload", "numpy", "train.py")
    wait_until(lambda: "train.py:2" in run_in_fork(*command, str(job.process.pid)).stdout, command[0], 30)
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.stderr()
    assert job.stdout() == "3\n"
    assert "they start over" in job.stderr()


def make_check(every: Mapping[str, object], settings: Mapping[str, str]) -> Any:
    """Check a rank that begins with the modules and variables of this process; ``every``: what was preloaded."""
    record = SimpleNamespace(initial=(), path={}, origins={}, namespaces=SimpleNamespace(list_replaced=lambda _: ()))
    hidden = SimpleNamespace(record=record, every=every, modules={}, taken=[], included=(), settings=settings)
    return import_check.ImportCheck(hidden)


def make_summary(closure: set[str], **values: object) -> SimpleNamespace:
    """Of the imports of ``closure``, which have read and changed nothing."""
    nothing = {"has_packages": False, "native": frozenset(), "uses_torch": False, "loggers": {}, "new": []}
    return SimpleNamespace(**{**nothing, "closure": closure, "inputs": import_effects.Inputs(), **values})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, "THING_EXPECTED is unset, not '7'"),
        ({"THING_EXPECTED": "7"}, None),
        ({"THING_EXPECTED": "7", "OTHER": "2"}, None),
        ({"THING_EXPECTED": "7", "THING_HOME": "/b"}, "THING_HOME is '/b', not '/a'"),
        ({"THING_EXPECTED": "7", "THING_HOME": None}, "THING_HOME is unset, not '/a'"),
        ({"THING_EXPECTED": "7", "THING_MODE": "2"}, "THING_MODE is '2', not unset"),
    ],
)
def test_an_import_that_reads_all_variables_with_a_prefix_needs_those_of_the_zygote(monkeypatch, changes, differs):
    """Or those that the program was expected to set."""
    for name in ("THING_EXPECTED", "THING_MODE", "OTHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THING_HOME", "/a")
    check, summary = make_check({}, {"THING_EXPECTED": "7"}), make_summary({"thing"})
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    assert check.find_difference(summary) is None, "no variable is read"
    summary.inputs.prefixes.add("THING_")
    assert check.find_difference(summary) == differs


@pytest.mark.parametrize(
    ("uses_torch", "is_imported", "differs"),
    [
        (True, True, "torch has another default dtype or device, or no gradients"),
        (False, True, None),
        (True, False, None),
        (False, False, None),
    ],
)
def test_the_default_dtype_matters_if_torch_is_imported_and_used(monkeypatch, uses_torch, is_imported, differs):
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # a debugger's is a difference too
    torch = SimpleNamespace(float32="32", get_default_dtype=lambda: "64", is_grad_enabled=lambda: True)
    torch._GLOBAL_DEVICE_CONTEXT = SimpleNamespace()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if is_imported:
        monkeypatch.setitem(sys.modules, "torch", torch)
    closure = {"package", "torch"} if uses_torch else {"package"}
    summary = make_summary(closure, has_packages=True, uses_torch=uses_torch)
    assert make_check({"torch": torch}, {}).find_difference(summary) == differs
