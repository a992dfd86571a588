"""Tests that a zygote starts again with torch alone if a package does what the table does not say."""

import pytest

from tests.conftest import read_events, write_program
from tests.features.preload.table import Installation

RANDOM = "an import keeps a random generator, a Random"

CHANGED = {
    "environment": ("import os\nos.environ['NEW'] = '1'", "importing changed changes the variable NEW;"),
    "folder": ("import os\nos.chdir('/')", "importing changed changes the working folder"),
    "handler": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "changes the handlers of signals"),
    "alarm": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 1000)", "changes the handlers of signals"),
    "umask": ("import os\nos.umask(0o27)", "changes the umask"),
    "file": ("import os\nF = open(os.devnull)", "changes open files"),
    "child": ("import subprocess\nP = subprocess.Popen(['sleep', '1000'])", "changes child processes"),
    "prints": ("print('as it is imported')", "importing changed prints"),
    "fails": ("raise KeyError", "importing changed failed: KeyError"),
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "2 threads run after importing",
    ),
    "stranger": ("import stranger", "stranger was imported, which is not a known package"),
    "random": ("import random\nR = random.Random()", RANDOM),
    "hidden": (
        "import random\nclass A:\n  def __init__(self): self.r = [random.Random(1)]\nX = {'a': A()}",
        RANDOM,
    ),
    "looks": ("try: import optional_part\nexcept ImportError: pass", "optional_part has the name of"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_package_that_does_more_than_the_table_says(tmp_path, what):
    source, reason = CHANGED[what]
    made = Installation(tmp_path)
    made.add("stranger", known=False)
    made.add("changed", source)
    (tmp_path / "optional_part").mkdir()
    plain = "except KeyError: pass" if what == "fails" else "finally: pass"
    write_program(
        tmp_path,
        "train.py",
        f"import sys\nimport torch\nprint('changed' in sys.modules)\ntry: import changed\n{plain}\n",
    )
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "imported" not in line) == ["[0] False", "[1] False"]
    assert done.stdout.count("as it is imported") == (2 if what == "prints" else 0)
    (note,) = [line for line in done.stderr.splitlines() if "preloading failed" in line]
    assert "preloading failed, only torch was preloaded: " in note
    assert reason in note
    assert note.endswith("; --preload torch avoids the attempt")


def test_a_package_that_does_nothing_else(tmp_path):
    made = Installation(tmp_path)
    made.add("part")
    made.add(
        "changed",
        "import os, random, part\nos.environ['NEW'] = '1'\nR = random.SystemRandom()\nG = random.Random()\n",
        loads=["part"],
        sets=["NEW"],
        generators=["changed.G"],
    )
    write_program(tmp_path, "train.py", "import sys\nprint('changed' in sys.modules)\nimport changed\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] True", "[1] True"]), done.stderr
    assert "note" not in done.stderr


def test_what_a_package_may_set_goes_where_it_is_given_up(tmp_path):
    """Also where the doubt comes last: a thread is seen by the zygote, not by the guard."""
    made = Installation(tmp_path)
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    made.add("changed", f"import os\nos.environ['NEW'] = '1'\n{thread}", sets=["NEW"])
    write_program(tmp_path, "train.py", "import os\nprint(os.environ.get('N' + 'EW'))\nimport changed\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] None", "[1] None"]), done.stderr
    assert "2 threads run after importing" in done.stderr


def test_an_import_sees_no_terminal_and_reads_nothing_of_what_is_for_a_rank(tmp_path):
    """The ranks of a job of several write into pipes, the launcher perhaps to a terminal."""
    made = Installation(tmp_path)
    made.add("changed", "import os, sys\nX = os.isatty(1), os.isatty(2), os.fstat(1).st_size, sys.stdin.read()")
    write_program(tmp_path, "train.py", "import os, changed\nprint(changed.X, os.read(0, 9))\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "--stdin", "1", "train.py", stdin="typed")
    sees = (False, False, 0, "")
    assert sorted(done.stdout.splitlines()) == [f"{sees} b'typed'", f"[0] {sees} b''"], done.stderr


def test_what_the_log_shows(tmp_path):
    made = Installation(tmp_path)
    made.add("changed", "import os; open(f'by-{os.getpid()}', 'w').close()")
    write_program(tmp_path, "train.py", "import torch, changed, yaml\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "--log-dir", "logs", "--run-id", "x", "train.py")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("by-*"))) == 1
    (ready,) = read_events(tmp_path / "logs", "ready")
    assert (ready["modules"], ready["because"]) == (["torch", "changed"], None)
    assert ready["excluded"] == [["yaml", "not in the table"]]


def test_a_file_of_the_users_that_the_table_knows_nothing_of(tmp_path):
    """The zygote has the last word."""
    made = Installation(tmp_path)
    made.add("other", "where = 'installed'")
    made.add("changed", "import other")
    write_program(tmp_path, "other.py", "where = 'mine'")
    write_program(tmp_path, "train.py", "import changed, torch, other\nprint(other.where)\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert sorted(done.stdout.splitlines()) == ["[0] mine", "[1] mine"], done.stderr


def test_dill_has_the_programs_main(tmp_path):
    """It keeps that from its import on, and distinguishes a program's own functions by it."""
    made = Installation(tmp_path)
    made.add("dill", "import dill._dill", modules={"dill": [], "dill._dill": []})
    write_program(made.site, "dill/_dill.py", "import __main__ as _main_module")
    write_program(tmp_path, "train.py", "import sys, dill\nprint(dill._dill._main_module is sys.modules['__main__'])\n")
    done = made.run(tmp_path, "run", "--nproc", "2", "train.py")
    assert sorted(done.stdout.splitlines()) == ["[0] True", "[1] True"], done.stderr
