"""Tests of the import auditor, and of zygotes that start again with torch alone: a package does more than is known."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from ddplaunch.core.events import ZygoteReady
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.preload import node
from tests.conftest import read_events, run_command, write_program
from tests.features.preload.table import Installation

RANDOM = "an import keeps a random generator, a Random"
HIDDEN = "import random\nclass A:\n  def __init__(self): self.r = [random.Random(1)]\nX = {'a': A()}"

VIOLATIONS = {
    "environment": ("import os\nos.environ['OMP_X'] = '1'", "importing environment changes the variable OMP_X"),
    "native": ("import os\nos.putenv('NEW', '1')", "importing native changes the variable NEW"),
    "own": ("import os\nos.environ['NEW'] = '1'", "None"),
    "folder": ("import os\nos.chdir('/')", "importing folder changes the working folder"),
    "handler": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "changes the handlers of signals"),
    "alarm": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 1000)", "changes the handlers of signals"),
    "umask": ("import os\nos.umask(0o27)", "changes the umask"),
    "file": ("import os\nF = open(os.devnull)", "changes open files"),
    "stranger": ("import unknown", "unknown was imported, which is not a known package"),
    "generator": ("import random\nR = random.Random()", RANDOM),
    "hidden": (HIDDEN, RANDOM),
    "harmless": ("import json\nX = json.dumps({})", "None"),
}
"""Modules, each with the violation that the auditor finds."""

AUDITS = """
import importlib, os, sys
from ddplaunch.core.rank.rank_runner import load_private_module

preload = "features/preload/rank/"
auditor_type = load_private_module(preload + "import_auditor").ImportAuditor
fork_fixups = load_private_module(preload + "fork_fixups")
sys.path.remove("")  # the folder is searched by ranks alone
config = {"known": sys.argv[1:]}
for name in sys.argv[1:]:
    if os.fork() == 0:
        auditor = auditor_type(config, frozenset(sys.modules), fork_fixups, lambda: [])
        importlib.import_module(name)
        auditor.check_import(name)
        auditor.finish()
        print(name, auditor.violation, sep="\\t", flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_the_import_auditor_finds(tmp_path):
    for name, (source, _) in VIOLATIONS.items():
        write_program(tmp_path, f"site/{name}.py", source)
    write_program(tmp_path, "site/unknown.py", "")
    done = run_command([sys.executable, "-c", AUDITS, *VIOLATIONS], tmp_path, {"PYTHONPATH": f"{tmp_path}/site"})
    found = dict(line.split("\t") for line in done.stdout.splitlines())
    assert found.keys() == VIOLATIONS.keys(), done.stderr
    assert {name: text for name, text in found.items() if VIOLATIONS[name][1] not in text} == {}


RunTwo = Callable[..., CompletedProcess[str]]


@pytest.fixture
def installed(tmp_path) -> Installation:
    return Installation(tmp_path)


@pytest.fixture
def run_two(installed, tmp_path) -> RunTwo:
    """Run a program in two ranks, with the packages that are installed."""

    def run(program: str, *words: str, **options: str) -> CompletedProcess[str]:
        write_program(tmp_path, "train.py", program)
        done = installed.run(tmp_path, "run", "--nproc", "2", *words, "train.py", **options)
        assert done.returncode == 0, done.stderr
        return done

    return run


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
STATE = """
import os, signal
os.environ["NEW"] = "1"
os.chdir("/")
os.umask(0o27)
signal.signal(signal.SIGUSR1, print)
"""

CHANGED = {
    "state": (STATE, "importing changed changes the working folder;"),
    "child": ("import subprocess\nP = subprocess.Popen(['sleep', '1000'])", "changes child processes"),
    "prints": ("print('as it is imported')", "importing changed prints"),
    "fails": ("raise KeyError", "importing changed failed: KeyError"),
    "thread": (THREAD, "2 threads run after importing"),
    "unknown": ("import unknown", "unknown was imported, which is not a known package"),
}

SHOWS_STATE = """
import os, signal, sys
import torch
os.umask(umask := os.umask(0))
state = os.getcwd() != "/", umask != 0o27, signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
print("changed" in sys.modules, "NEW" in os.environ, *state)
try: import changed
except KeyError: pass
"""


@pytest.mark.parametrize("what", CHANGED)
def test_a_package_that_does_more_than_the_table_says(installed, run_two, what):
    """Only torch is preloaded if an import does more than its entry allows, and ranks see none of its effects."""
    source, reason = CHANGED[what]
    installed.add("unknown", known=False)
    installed.add("changed", source)
    done = run_two(SHOWS_STATE)
    shown = sorted(line for line in done.stdout.splitlines() if "imported" not in line)
    assert shown == [f"[{rank}] False False True True True" for rank in range(2)]
    assert done.stdout.count("as it is imported") == (2 if what == "prints" else 0)
    (note,) = [line for line in done.stderr.splitlines() if "preloading failed" in line]
    assert "preloading failed, only torch was preloaded: " in note
    assert reason in note
    assert note.endswith("; --preload torch avoids the attempt")


def test_a_package_that_does_what_the_table_says(installed, run_two):
    installed.add("part")
    source = "import os, random, part\nos.environ['NEW'] = '1'\nR = random.SystemRandom()\n"
    source += "STARTED = os.getpid()\n"
    installed.add("changed", source, loads=["part"])
    done = run_two(
        "import sys\nbefore = 'changed' in sys.modules\nimport changed, os\n"
        "print(before, changed.STARTED != os.getpid())\n"
    )
    assert sorted(done.stdout.splitlines()) == ["[0] False True", "[1] False True"]
    assert "note" not in done.stderr


def test_a_variable_that_a_package_may_set_is_removed_when_the_zygote_starts_again(installed, run_two):
    """The variable is removed also if the reason is a thread, which the zygote finds after the audit."""
    installed.add("changed", f"import os\nos.environ['NEW'] = '1'\n{THREAD}")
    done = run_two("import os\nprint(os.environ.get('N' + 'EW'))\nimport changed\n")
    assert sorted(done.stdout.splitlines()) == ["[0] None", "[1] None"]
    assert "2 threads run after importing" in done.stderr


def test_an_import_sees_no_terminal_and_none_of_the_input_for_a_rank(installed, run_two):
    """An import in the zygote sees no terminal, and its input stays for the rank."""
    installed.add("changed", "import os, sys\nX = os.isatty(1), os.isatty(2), os.fstat(1).st_size, sys.stdin.read()")
    done = run_two("import os, changed\nprint(changed.X, os.read(0, 9))\n", "--stdin", "1", stdin="typed")
    sees = (False, False, 0, "")
    assert sorted(done.stdout.splitlines()) == [f"{sees} b'typed'", f"[0] {sees} b''"], done.stderr


def test_the_log_has_what_was_preloaded(installed, run_two, tmp_path):
    installed.add("changed", "import os; open(f'by-{os.getpid()}', 'w').close()")
    run_two("import torch, changed, yaml\n", "--log-dir", "logs", "--run-id", "x")
    assert len(list(tmp_path.glob("by-*"))) == 1
    (ready,) = read_events(tmp_path / "logs", "zygote_ready")
    assert (ready["modules"], ready["because"]) == (["torch", "changed"], None)
    assert ready["excluded"] == [["yaml", "not in the table"]]


def test_a_file_of_the_user_hides_a_package_that_another_imports(installed, run_two, tmp_path):
    """The zygote finds an import that the table does not list and that a file of the user shadows."""
    installed.add("other", "where = 'installed'")
    installed.add("changed", "import other")
    write_program(tmp_path, "other.py", "where = 'mine'")
    done = run_two("import changed, torch, other\nprint(other.where)\n")
    assert sorted(done.stdout.splitlines()) == ["[0] mine", "[1] mine"], done.stderr


def test_dill_has_the_main_module_of_the_program(installed, run_two):
    """dill, which stores ``__main__`` at its import, has the program's."""
    installed.add("dill", "import dill._dill", modules={"dill": [], "dill._dill": []})
    write_program(installed.site, "dill/_dill.py", "import __main__ as _main_module")
    done = run_two("import sys, dill\nprint(dill._dill._main_module is sys.modules['__main__'])\n")
    assert sorted(done.stdout.splitlines()) == ["[0] True", "[1] True"], done.stderr


def test_ranks_that_are_forked_or_may_not_be_import_no_torch_themselves(monkeypatch):
    monkeypatch.setattr(node, "record_if_new", lambda *_: True)
    notes = list[str]()
    for forks, unsafe in ((True, None), (False, "b"), (False, None)):
        event = ZygoteReady(forks, unsafe, 0.1, because="a")
        node.SlowStartNotes(ZygotePlan(reason="a"), None, notes.append).observe(event)
    assert [note.partition(": ")[2] for note in notes if "not forked" in note] == ["b"]
    assert [note.partition(";")[0] for note in notes[1:]] == ["each rank imports torch itself because of a"]
