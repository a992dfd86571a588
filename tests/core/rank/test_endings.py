"""Tests that a program ends under the launcher as under plain ``python``: same exit code, same last output.

A fork of the zygote ends by code of ddplaunch instead of the interpreter's (rank_runner.py). What the zygote has
imported matters little to that, so most cases run in the ranks of one zygote that preloads next to nothing.
"""

from __future__ import annotations

import json
import marshal
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.core.rank.zygote_channel import send_message
from tests.conftest import SLOW_START, clean_environment, ddplaunch_command, write_program
from tests.core.rank.zygote_driver import ZygoteDriver
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, FORKED

ENDINGS = {
    "returns": "print('done')",
    "exit 3": "import sys; sys.exit(3)",
    "exit None": "import sys; sys.exit(None)",
    "exit 261": "import sys; sys.exit(261)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit with a text": "import sys; print('before'); sys.exit('why: übel')",
    "exit with a large text": "import sys; sys.exit('x' * 300_000)",
    "exit with an object": """
        import sys
        class Reason:
            def __str__(self):
                return "reason"
        sys.exit(Reason())
    """,
    "exception": """
        def inner():
            raise ValueError("boom")
        print("before")
        inner()
    """,
    "a namespace package that is deleted": """
        import sys
        import space.inner.leaf
        print(space.inner.leaf.name)
        del sys.modules["space"]
    """,
    "exception that cannot be shown": """
        class Odd(Exception):
            def __str__(self):
                raise TypeError
        raise Odd
    """,
    "exception chain": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            try:
                {}["key"]
            except KeyError:
                raise RuntimeError("second") from error
    """,
    "exception of many lines and odd characters": r"raise ValueError('one\ntwo \udc80 \U0001f600 \"')",
    "base exception": "raise GeneratorExit('odd')",
    "syntax error in an imported module": "import broken",
    "error in an imported module": "import failing",
    "recursion": """
        def down(n):
            return down(n + 1)
        try:
            down(0)
        except RecursionError as error:
            raise RecursionError(str(error)) from None
    """,
    "the user's excepthook": """
        import sys
        def hook(kind, value, trace):
            print("hook", kind.__name__, value, trace.tb_frame.f_code.co_name, trace.tb_next, sys.exc_info())
            print(sys.last_value is value, sys.last_type is kind, sys.last_traceback is trace)
        sys.excepthook = hook
        raise ValueError("for the hook")
    """,
    "an excepthook that fails": """
        import sys
        def hook(kind, value, trace):
            raise KeyError("in the hook")
        sys.excepthook = hook
        raise ValueError("for the hook")
    """,
    "an excepthook that exits": """
        import sys
        sys.excepthook = lambda kind, value, trace: sys.exit(9)
        raise ValueError("for the hook")
    """,
    "an excepthook that leaves at once": """
        import os, sys
        sys.excepthook = lambda kind, value, trace: os._exit(11)
        raise ValueError("for the hook")
    """,
    "an excepthook that is None": """
        import sys
        sys.excepthook = None
        raise ValueError("not lost")
    """,
    "an excepthook that is deleted": """
        import sys
        del sys.excepthook
        raise ValueError("not lost")
    """,
    "print that is silent in a rank": """
        import builtins, sys
        builtins.print = lambda *words, **options: None
        sys.exit("not lost")
    """,
    "an exit code that is no plain number": """
        import sys
        class Code(int):
            def __and__(self, other):
                raise KeyError
        sys.exit(Code(3))
    """,
}
"""Programs that end by an exit or an exception; what becomes of it is our code in both start modes."""

LAST_STEPS = {
    "exception in a thread": """
        import threading
        def work():
            raise ValueError("in a thread")
        threading.Thread(target=work, name="worker").start()
    """,
    "exit in a thread": "import sys, threading; threading.Thread(target=sys.exit, args=(4,)).start()",
    "os._exit in a thread that outlives main": """
        import os, sys, threading
        print("buffered by main")
        main = threading.main_thread()
        def work():
            main.join()
            sys.stdout.buffer.write(b"never flushed")
            os._exit(6)
        threading.Thread(target=work).start()
    """,
    "exception in atexit": """
        import atexit
        def last():
            raise ValueError("in atexit")
        atexit.register(print, "still runs")
        atexit.register(last)
    """,
    "exit in atexit": "import atexit, sys; atexit.register(lambda: sys.exit(5))",
    "order of atexit": """
        import atexit, threading
        for number in range(3):
            atexit.register(print, "atexit", number)
        threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
        print("main")
    """,
    "atexit after an exception": """
        import atexit, sys
        def last():
            print(sys.exc_info(), repr(sys.last_value))
        atexit.register(last)
        raise ValueError("seen by atexit")
    """,
    "KeyboardInterrupt": """
        def deep():
            raise KeyboardInterrupt
        deep()
    """,
    "a subclass of KeyboardInterrupt": """
        class Stop(KeyboardInterrupt):
            pass
        raise Stop
    """,
    "KeyboardInterrupt with the user's excepthook": """
        import sys
        sys.excepthook = lambda kind, value, trace: print("hook", kind.__name__)
        raise KeyboardInterrupt
    """,
    "KeyboardInterrupt while a daemon thread runs": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        raise KeyboardInterrupt
    """,
    "os._exit": "import os; print('lost in the buffer', end=''); os._exit(7)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGPIPE": """
        import os, signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    """,
    "SIGTERM handled": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(33))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "daemon threads": """
        import threading
        started = threading.Event()
        state = {"count": 0}
        def work():
            while True:
                state["count"] += 1
                started.set()
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        started.wait()
        print("main done")
    """,
    "a daemon thread, __del__ and atexit": """
        import atexit, threading
        class Kept:
            def __del__(self):
                print("deleted")
        kept = Kept()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        atexit.register(print, "atexit")
    """,
    "an executor that is not shut down": """
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(2).submit(print, "submitted")
    """,
    "globals are deleted": """
        import os
        class Kept:
            def __init__(self, name):
                self.name = name
            def __del__(self):
                print("deleted", self.name, os.path.basename(__name__), helper(self))
        def helper(kept):
            return len(kept.name)
        kept = Kept("global")
    """,
    "cycles are deleted": """
        import os
        class Kept:
            def __del__(self):
                print("deleted", os.path.basename(__name__))
        cycle = [Kept()]
        cycle.append(cycle)
    """,
    "globals of a module are deleted": """
        import holder
        class Kept:
            def __del__(self):
                print("deleted", __name__, holder.name)
        holder.kept = Kept()
    """,
    "exception in __del__ at the end": """
        class Kept:
            def __del__(self):
                raise ValueError("in __del__")
        kept = Kept()
    """,
    "__del__ of what an exception holds": """
        class Kept:
            def __del__(self):
                print("deleted")
        def work():
            kept = Kept()
            raise ValueError("holds kept")
        work()
    """,
    "files are flushed": "file = open('kept.txt', 'w'); file.write('all of it')",
    "files of a module are flushed": """
        import holder
        holder.file = open("kept.txt", "w")
        holder.file.write("all of it")
    """,
    "files held by threading.excepthook are flushed": """
        import threading
        file = open("kept.txt", "w")
        file.write("all of it")
        threading.excepthook = lambda arguments: print(file)
    """,
    "files held by sys.excepthook are flushed": """
        import sys
        file = open("kept.txt", "w")
        file.write("all of it")
        sys.excepthook = lambda kind, value, trace: print(file)
    """,
    "globals held by a signal handler": """
        import signal
        class Kept:
            def __del__(self):
                print("deleted", __name__)
        kept = Kept()
        def handler(number, frame):
            print(kept)
        signal.signal(signal.SIGUSR1, handler)
    """,
    "other things in sys.modules": """
        import sys
        class Odd:
            pass
        sys.modules["odd"], sys.modules["none"], sys.modules["__main__"] = Odd(), None, Odd()
    """,
    "output without a newline": "print('no end', end=''); import sys; sys.stderr.write('nor here')",
    "a closed stdout": "import sys; print('before'); sys.stdout.close()",
    "a closed stderr": "import sys; sys.stderr.close(); raise ValueError('not shown')",
    "stdout replaced": """
        import io, sys
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="latin-1")
        print("ü", end="")
    """,
    "stdout's descriptor closed": "import os; print('lost', end=''); os.close(1)",
    "written through C": """
        import ctypes
        ctypes.CDLL(None).puts(b"from C")
    """,
}
"""Programs with something left to do at the end, which in a new interpreter is the interpreter's own."""

ODD = {
    "exit beyond C": "import sys; sys.exit(1 << 70)",
    "exit with an object that cannot be shown": """
        import sys
        class Reason:
            def __str__(self):
                raise ValueError
        sys.exit(Reason())
    """,
}
"""Of which some versions of Python say something themselves."""

BY_FAULT = {
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
}

MODULES = {
    "broken.py": "x = = 3\n",
    "failing.py": "def load():\n    raise ImportError('not today')\nload()\n",
    "holder.py": "name = __name__\n",
    "space/inner/leaf.py": "name = __name__\n",
}

HOSTILE = {
    "builtins are replaced": "import builtins; builtins.open = builtins.print = None; raise ValueError('boom')",
    "os.open is replaced": "import os; os.open = os.write = os.fstat = lambda *words: 1 / 0; raise ValueError('boom')",
    "os.environ is replaced": "import os; os.environ = None; raise ModuleNotFoundError('boom')",
    "time.time_ns is replaced": "import time; time.time_ns = None; raise ValueError('boom')",
    "sys.excepthook is None": "import sys; sys.excepthook = sys.__excepthook__ = None; raise ValueError('boom')",
    "sys.excepthook is deleted": "import sys; del sys.excepthook, sys.__excepthook__; raise ValueError('boom')",
    "sys.stderr is deleted": "import sys; del sys.stderr; raise ValueError('boom')",
    **{
        f"__str__ raises {kind}": f"""
            class Odd(Exception):
                def __str__(self):
                    raise {kind}(44)
            raise Odd
        """
        for kind in ("SystemExit", "KeyboardInterrupt", "GeneratorExit")
    },
    "str() gives a str of its own": """
        class Text(str):
            __len__ = __getitem__ = encode = __format__ = None
        class Odd(Exception):
            def __str__(self):
                return Text("boom")
        raise Odd
    """,
    "with_traceback is overridden": """
        class Odd(Exception):
            with_traceback = __traceback__ = __context__ = None
        raise Odd("boom")
    """,
    "a metaclass has a __name__": """
        class Meta(type):
            @property
            def __name__(cls):
                raise KeyError
        class Odd(Exception, metaclass=Meta):
            pass
        raise Odd("boom")
    """,
    "__getattribute__ is broken": """
        class Odd(Exception):
            def __getattribute__(self, name):
                raise ZeroDivisionError
        raise Odd("boom")
    """,
    "__class__ is another": """
        class Odd(Exception):
            __class__ = SystemExit
        raise Odd("boom")
    """,
}
"""Programs that fail after they have replaced what shows that, or by an exception that resists."""

IN_BOTH = {"KeyboardInterrupt", "exit in a thread", "atexit after an exception", "files are flushed", "a closed stderr"}
"""Last steps that are tried in a new interpreter too."""

BY_LAUNCHER = ("exit 3", "exception", "KeyboardInterrupt", "files are flushed")
"""Endings that are tried with a whole launcher too, and with any Python."""

MODES = {"forked": FORKED, "exec": EXEC}

forked_and_exec = pytest.mark.parametrize("start", MODES)

REPORT = re.compile(r"^ddplaunch: rank 0 .*", re.MULTILINE | re.DOTALL)

ENVIRON = {"PYTHONIOENCODING": "utf-8:backslashreplace"}

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        write_program(tmp_path, name, text)
    return tmp_path


@pytest.fixture(scope="module")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ZygoteDriver]]:
    """A zygote for each start mode, whose ranks run in one folder."""
    folder = tmp_path_factory.mktemp("endings")
    for name, text in MODULES.items():
        write_program(folder, name, text)
    with ExitStack() as stack:
        yield {name: stack.enter_context(ZygoteDriver(folder, words, ENVIRON)) for name, words in MODES.items()}


def run(words: Sequence[str], folder: Path, **options: Any) -> Done:
    given = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "timeout": scaled_timeout(90),
        **options,
    }
    environment = clean_environment(ENVIRON)
    return subprocess.run(words, cwd=folder, env=environment, encoding="utf-8", errors="surrogateescape", **given)


def plain(folder: Path, *words: str, **options: Any) -> Done:
    return run([sys.executable, *words], folder, **options)


def ours(folder: Path, *words: str, **options: Any) -> Done:
    done = run(ddplaunch_command("run", "--nproc", "1", *words), folder, **options)
    done.stderr = SLOW_START.sub("", done.stderr or "")
    return done


def comparable(text: str) -> str:
    """Without what differs between any two runs, and the source lines that an interpreter at its end cannot read."""
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = re.sub(r"object refcount : \d+", "object refcount : …", text)
    return re.sub(r"(in __del__\n)    .*\n", r"\1", text)


def assert_same(rank: Done, program: Done) -> None:
    """The rank printed what the plain program printed, and ended in the same way."""
    assert comparable(rank.stdout or "") == comparable(program.stdout or "")
    assert comparable(rank.stderr) == comparable(program.stderr)
    assert rank.returncode == program.returncode


def assert_same_with_report(job: Done, program: Done) -> None:
    """As ``assert_same``, but the launcher reports a failure, and returns the exit code of a shell."""
    assert bool(REPORT.search(job.stderr)) == (program.returncode != 0)
    job.stderr = REPORT.sub("", job.stderr)
    if program.returncode < 0:
        program.returncode = 128 - program.returncode
    assert_same(job, program)


@pytest.mark.parametrize("ending", [*ENDINGS, *LAST_STEPS])
def test_ends_as_under_python(ending: str, zygotes: dict[str, ZygoteDriver]) -> None:
    for start in MODES if ending in {*ENDINGS, *IN_BOTH} else ("forked",):
        folder = zygotes[start].folder
        kept = folder / "kept.txt"
        write_program(folder, "train.py", {**ENDINGS, **LAST_STEPS}[ending])
        program = plain(folder, "train.py")
        expected = kept.read_text() if kept.exists() else None
        kept.unlink(missing_ok=True)
        assert_same(zygotes[start].run(), program)
        assert (kept.read_text() if kept.exists() else None) == expected, start
        kept.unlink(missing_ok=True)


@pytest.mark.smoke
@forked_and_exec
@pytest.mark.parametrize("ending", BY_LAUNCHER)
def test_a_job_ends_as_under_python(ending: str, start: str, folder: Path) -> None:
    write_program(folder, "train.py", {**ENDINGS, **LAST_STEPS}[ending])
    assert_same_with_report(ours(folder, *MODES[start], "train.py"), plain(folder, "train.py"))


@forked_and_exec
@pytest.mark.parametrize("ending", HOSTILE)
def test_an_exception_is_shown_and_recorded_whatever_the_program_has_replaced(
    ending: str, start: str, zygotes: dict[str, ZygoteDriver], tmp_path: Path
) -> None:
    folder, record = zygotes[start].folder, tmp_path / "error.json"
    write_program(folder, "train.py", HOSTILE[ending])
    rank, program = zygotes[start].run(error_file=str(record)), plain(folder, "train.py")
    assert (rank.stdout, rank.returncode) == ("", 1) == (program.stdout, program.returncode)
    assert set(comparable(rank.stderr).splitlines()) == set(comparable(program.stderr).splitlines())
    kind = re.search(r"raise (\w+)[^\n]*\Z", HOSTILE[ending].strip()).group(1)
    said = json.loads(record.read_text())["message"]["message"]
    assert said == (f"{kind}: <exception str() failed>" if "__str__ raises" in ending else f"{kind}: boom")


@forked_and_exec
@pytest.mark.parametrize("ending", ODD)
def test_odd_exits_have_the_same_code(ending: str, start: str, zygotes: dict[str, ZygoteDriver]) -> None:
    write_program(zygotes[start].folder, "train.py", ODD[ending])
    rank, program = zygotes[start].run(), plain(zygotes[start].folder, "train.py")
    assert (rank.returncode, rank.stdout) == (program.returncode, "")
    assert "ddplaunch/core/rank" not in rank.stderr


@forked_and_exec
def test_a_module_ends_as_under_python(start: str, folder: Path) -> None:
    write_program(folder, "package/train.py", ENDINGS["error in an imported module"])
    job = ours(folder, *MODES[start], "-m", "package.train")
    assert_same_with_report(job, plain(folder, "-m", "package.train"))


@forked_and_exec
@pytest.mark.parametrize("fault", BY_FAULT)
def test_a_fault_is_reported_as_by_faulthandler(fault: str, start: str, zygotes: dict[str, ZygoteDriver]) -> None:
    """This differs from a plain program: faulthandler is enabled, and the last frame that it shows is ours."""
    folder = zygotes[start].folder
    write_program(folder, "train.py", BY_FAULT[fault])
    rank, program = zygotes[start].run(), plain(folder, "-X", "faulthandler", "train.py")
    extra = re.compile(r'^  File ".*/ddplaunch/core/rank/.*\n|^Extension modules: .*\n|^\n', re.MULTILINE)
    assert program.stderr.startswith("Fatal Python error: ")
    assert comparable(extra.sub("", rank.stderr)) == comparable(extra.sub("", program.stderr))
    assert rank.returncode == program.returncode


BY_LINES = "import sys; sys.stdout.reconfigure(line_buffering=True)\n"
"""What ranks do by themselves: plain Python notices only at the end of a program that nothing takes its output."""


@forked_and_exec
def test_a_full_disk_is_reported(start: str, zygotes: dict[str, ZygoteDriver]) -> None:
    folder = zygotes[start].folder
    write_program(folder, "train.py", BY_LINES + "print('lost')")
    with open("/dev/full", "w") as full:
        assert_same(zygotes[start].run(full), plain(folder, "train.py", stdout=full))


@forked_and_exec
@pytest.mark.parametrize(
    "text", ["print('lost')", "import sys; print('lost'); sys.exit(3)", "while True: print('more')"]
)
def test_output_without_a_reader(text: str, start: str, zygotes: dict[str, ZygoteDriver]) -> None:
    folder = zygotes[start].folder
    write_program(folder, "train.py", BY_LINES + text)
    read, pipe = os.pipe()
    os.close(read)
    with os.fdopen(pipe, "wb") as closed:
        assert_same(zygotes[start].run(closed), plain(folder, "train.py", stdout=closed))


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [pytest.param("exception", marks=pytest.mark.smoke), "daemon threads", "files are flushed", "KeyboardInterrupt"],
)
def test_ends_as_under_python_with_torch(ending: str, folder: Path) -> None:
    """The interpreter's own end in a fork, with all that torch has registered, and ours instead of it."""
    write_program(folder, "train.py", "import torch, numpy\n" + textwrap.dedent({**ENDINGS, **LAST_STEPS}[ending]))
    assert_same_with_report(ours(folder, "--start", "zygote", "train.py"), plain(folder, "train.py"))


@forked_and_exec
def test_tracebacks_of_a_function_and_of_its_module_begin_with_it(start: str, folder: Path) -> None:
    train = write_program(folder, "train.py", "import holder\nholder.missing\ndef main():\n    pass\n")
    done = ours(folder, *MODES[start], "train.py:main")
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{train}", line 2, in <module>\n')
    write_program(folder, "train.py", "def main():\n    raise ValueError('boom')\n")
    done = ours(folder, *MODES[start], "train.py:main")
    assert REPORT.sub("", done.stderr) == (
        f'Traceback (most recent call last):\n  File "{train}", line 2, in main\n'
        "    raise ValueError('boom')\nValueError: boom\n"
    )
    assert done.returncode == 1


def test_a_rank_that_cannot_be_set_up_shows_why(zygotes: dict[str, ZygoteDriver]) -> None:
    rank = zygotes["forked"].run(cpus=[1 << 15])
    error = "ddplaunch: cannot start rank 0: [Errno 22] Invalid argument\n"
    assert (rank.stdout, rank.stderr, rank.returncode) == ("", error, 1)


def test_a_zygote_without_a_launcher_removes_its_files(tmp_path: Path) -> None:
    with ZygoteDriver(tmp_path, FORKED, ENVIRON) as zygote:
        (left := tmp_path / "left").mkdir()
        send_message(zygote._socket, {"op": "remove_path", "path": str(left)})
    assert not left.exists()


@forked_and_exec
def test_a_traceback_without_frames_of_the_program_keeps_the_others(start: str, folder: Path) -> None:
    write_program(folder, "train.py", "import os\nos.unlink(__file__)\nraise SystemExit(3)\n")
    done = ours(folder, *MODES[start], "--max-restarts", "1", "train.py")
    assert done.returncode == 1
    assert re.search(r'^  File ".*rank_runner.py", line \d+, in _make_script_call$', done.stderr, re.MULTILINE), (
        done.stderr
    )


@forked_and_exec
@pytest.mark.parametrize("body", [bytes(50), b"", b"c\0", marshal.dumps(7)], ids=["zeros", "cut", "torn", "a number"])
def test_a_damaged_compiled_program_is_refused(body: bytes, start: str, folder: Path) -> None:
    (folder / "train.pyc").write_bytes(MAGIC_NUMBER + bytes(12) + body)
    done = ours(folder, *MODES[start], "train.pyc")
    assert (done.returncode, done.stdout) == (2, "")
    assert "train.pyc is damaged: it holds no code object" in done.stderr
    assert len(done.stderr.splitlines()) <= 3, done.stderr


def test_a_program_that_cannot_be_executed(folder: Path) -> None:
    program = write_program(folder, "program", "#!/proc/no/interpreter\n")
    program.chmod(0o755)
    done = ours(folder, "--no-python", "./program")
    assert done.returncode == 126
    assert "cannot execute ./program: No such file or directory" in done.stderr


# -------------------------------------------------------------------------------------------------- several ranks


def test_a_failure_after_rank_0_has_ended_is_the_jobs(folder: Path) -> None:
    write_program(
        folder,
        "train.py",
        """
        import atexit, os, sys, time
        if os.environ["RANK"] == "0":
            print("first, and no newline", end="")
            atexit.register(lambda: open("finished", "w").close())
        else:
            while not os.path.exists("finished"):
                time.sleep(0.01)
            sys.exit(4)
        """,
    )
    done = run(ddplaunch_command("run", "--nproc", "2", *FORKED, "train.py"), folder)
    assert (done.stdout, done.returncode) == ("[0] first, and no newline\n", 4)
    assert "rank 1 exited with code 4" in done.stderr


@forked_and_exec
def test_output_at_exit_is_shown(start: str, folder: Path) -> None:
    write_program(
        folder,
        "train.py",
        """
        import atexit
        class Kept:
            def __del__(self):
                print("deleted", end="")
        kept = Kept()
        atexit.register(print, "atexit")
        print("main")
        """,
    )
    done = run(ddplaunch_command("run", "--nproc", "3", *MODES[start], "train.py"), folder)
    assert done.returncode == 0
    for rank in range(3):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] {word}" for word in ("main", "atexit", "deleted")]


@forked_and_exec
def test_short_lived_multiprocessing_helpers_are_not_reported(start: str, folder: Path) -> None:
    """A forkserver and a resource tracker notice for themselves that the program has gone."""
    write_program(
        folder,
        "train.py",
        """
        import multiprocessing
        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["late"])
            process = context.Process(target=print, args=("child",))
            process.start()
            process.join()
        """,
    )
    write_program(folder, "late.py", "import atexit, time\natexit.register(time.sleep, 1)  # as on a busy machine\n")
    done = ours(folder, *MODES[start], "train.py")
    assert (done.stdout, done.stderr, done.returncode) == ("child\n", "", 0)
