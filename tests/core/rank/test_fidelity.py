"""Tests that a rank sees the same as ``python train.py``: modules, variables, files, arguments and signals.

The probes in tests/programs write down what they see; one launch serves many tests. Where torch does not matter the
zygote preloads next to nothing, which forks all the same and starts sooner.
"""

from __future__ import annotations

import json
import os
import pty
import py_compile
import resource
import signal
import subprocess
import sys
import zipapp
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAMS, Launch, clean_environment, ddplaunch_command, run_command, write_program
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, FORKED

pytestmark = pytest.mark.slow

STARTS = {"zygote": ("--start", "zygote", "--preload", "torch"), "forked": FORKED, "exec": EXEC}
forked_and_exec = pytest.mark.parametrize("start", ["forked", "exec"])

OURS = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "DDPLAUNCH_DEVICE", "DDPLAUNCH_PREEMPTED_FILE",
    "DDPLAUNCH_TERMINAL",
}  # fmt: skip
"""The variables that a rank has and a plain program has not, all of them documented."""

HIGH = 500
"""Above this are the two descriptors by which a rank can be asked what it is doing."""

Seen = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """How a probe is started: its words, and what the process that starts it looks like."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    nproc: int = 2
    prepare: Callable[[], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def plain(self, folder: Path) -> Seen:
        words = ["-m", *self.words[1:]] if self.words[0] == "-m" else self.words
        self._run([sys.executable, *words], folder, "plain")
        return _seen(folder / "plain")

    def ranks(self, folder: Path, start: str) -> list[Seen]:
        self._run(ddplaunch_command("run", "--nproc", str(self.nproc), *STARTS[start], *self._target()), folder, start)
        return [_seen(folder / f"{start}{rank}") for rank in range(self.nproc)]

    def _target(self) -> Sequence[str]:
        at = 2 if self.words[0] == "-m" else 1
        return (*self.words[:at], "--", *self.words[at:])

    def _run(self, words: list[str], folder: Path, name: str) -> None:
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PROBE_OUT": str(folder / name)}
        options = {"stdin": subprocess.DEVNULL, "cwd": folder, **self.options}
        done = subprocess.run(
            words, env=clean_environment({**fixed, **self.env}), preexec_fn=self.prepare, start_new_session=True,
            timeout=scaled_timeout(100), **options,
        )  # fmt: skip
        assert done.returncode == 0


def _seen(path: Path) -> Seen:
    seen: Seen = json.loads(path.read_text())
    seen.get("environ", {}).pop("PROBE_OUT", None)
    for number, handler in seen.get("signals", {}).get("handlers", {}).items():
        if "function _write_stacks at " in handler:
            seen["signals"]["handlers"][number] = "_write_stacks"
    if "interpreter" in seen:  # a finder of ours is there until torch.distributed is imported
        seen["interpreter"]["finders"] = [each for each in seen["interpreter"]["finders"] if each != "PostImportHook"]
    return seen


def assert_same(rank: Seen, plain: Seen, fields: Sequence[str] = (), *, but: Sequence[str] = ()) -> None:
    """Compare field by field all that is alike in any rank that has torch no more than the plain program has."""
    for name in fields or [name for name in plain if name not in {"loaded", "title", *but}]:
        ours, theirs = rank[name], plain[name]
        if name == "environ":
            ours = {key: value for key, value in ours.items() if key not in OURS}
            theirs = {key: value for key, value in theirs.items() if key not in OURS}
        if name == "descriptors":  # 0 to 2 are pipes where there are several ranks
            ours, theirs = ({key: to for key, to in each.items() if 2 < int(key) < HIGH} for each in (ours, theirs))
        if name == "signals":
            theirs = _shielded(theirs)
        if name == "streams" and not theirs["stdout"]["write_through"]:  # each line comes at once, wherever it goes
            theirs = {**theirs, "stdout": {**theirs["stdout"], "line_buffering": True}}
        assert ours == theirs, name


def _shielded(signals: dict[str, Any]) -> dict[str, Any]:
    """The same dispositions, but the scheduler's warning is ignored until the program handles it (docs/preemption.md).

    And that two real-time signals are caught, for ``ddplaunch stacks``: the second in C, so that to Python it is an
    ignored one.
    """
    warning, first, second = int(signal.SIGUSR2), int(signal.SIGRTMIN), int(signal.SIGRTMIN) + 1
    handlers = {**signals["handlers"], **dict.fromkeys(map(str, (warning, second)), str(signal.SIG_IGN))}
    handlers[str(first)] = "_write_stacks"
    ignored, caught = sorted({*signals["ignored"], warning}), sorted({*signals["caught"], first, second})
    return {**signals, "handlers": handlers, "ignored": ignored, "caught": caught}


# ------------------------------------------------------------------------------------------ everything, with torch


FIELDS = (
    "main", "argv", "orig_argv", "path", "cwd", "environ", "streams", "signals", "descriptors", "tasks", "limits",
    "threads", "interpreter", "others", "comm", "stdin", "session",
)  # fmt: skip


@pytest.mark.ci
def test_a_rank_sees_what_a_plain_program_sees(tmp_path: Path) -> None:
    """It has imported torch; rank 0 sees the same as every other, as the store is another process."""
    inherited = os.open(os.devnull, os.O_RDONLY)
    high = 77  # out of the way of what anything opens meanwhile
    os.dup2(inherited, high, inheritable=True)
    os.close(inherited)
    try:
        scene = Scene(
            (str(PROGRAMS / "probe.py"), "one", "--two", "", "three four"),
            env={"PROBE_IMPORT": "torch"},
            options={"pass_fds": (high,)},
        )
        plain, forked, fresh = scene.plain(tmp_path), scene.ranks(tmp_path, "zygote"), scene.ranks(tmp_path, "exec")
    finally:
        os.close(high)
    assert {*FIELDS, "loaded", "title"} == plain.keys()
    for seen in (plain, *forked, *fresh):
        assert seen["descriptors"]["77"] == os.devnull
    for each in (*forked, *fresh):
        assert_same(each, plain, FIELDS)
        assert not {"zygote", "worker", "channel", "processes", "ddplaunch"} & {*each["loaded"]}
    assert {*fresh[1]["loaded"]} - {*plain["loaded"]} <= {"__future__", "faulthandler"}
    program = f"{PROGRAMS / 'probe.py'} one --two  three four"
    assert forked[1]["title"] == [f"python {program}"]  # what ps shows
    assert " ".join(fresh[1]["title"]).endswith(program)


# --------------------------------------------------------------------------------------------- other surroundings


def ignore(*numbers: signal.Signals) -> Callable[[], None]:
    def prepare() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    return prepare


def lower_limits() -> None:
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))


PROBE = (str(PROGRAMS / "probe.py"),)

SCENES = {
    "C locale, in the background": Scene(
        PROBE, {"LC_ALL": "C"}, prepare=ignore(signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
    ),
    "POSIX locale, nothing coerced": Scene(PROBE, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    "other encoding, under nohup": Scene(PROBE, {"PYTHONIOENCODING": "latin-1:replace"}, prepare=ignore(signal.SIGHUP)),
    "UTF-8 mode, low limits": Scene(PROBE, {"PYTHONUTF8": "1", "LC_ALL": "C"}, prepare=lower_limits),
    "unbuffered, safe path": Scene(PROBE, {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}),
    "flags": Scene(
        PROBE,
        {"PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error", "PYTHONPATH": "."},
    ),
    "relative path without .py": Scene(("./nested/../nested/program", "x")),
    "symbolic link": Scene(("./linked.py",)),
    "compiled": Scene(("./compiled.pyc", "x")),
    "folder": Scene(("./nested/../nested/", "x")),
    "folder, safe path": Scene(("nested",), {"PYTHONSAFEPATH": "1"}),
    "archive": Scene(("archive", "x", "--y")),
    "module": Scene(("-m", "package.module", "x", "--y")),
    "package": Scene(("-m", "package")),
    "single": Scene(PROBE, nproc=1),
}

BY_INTERPRETER = ("C locale, in the background", "other encoding, under nohup", "unbuffered, safe path")
"""What a new interpreter reads from its environment by itself, so that ``--start exec`` cannot differ."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the probe in every shape."""
    folder = tmp_path_factory.mktemp("stage")
    text = (PROGRAMS / "probe.py").read_text()
    for name in (
        "nested/probe.py",
        "nested/program",
        "nested/__main__.py",
        "package/module.py",
        "package/__main__.py",
        "package/__init__.py",
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name.endswith("__init__.py") else text)
    (folder / "linked.py").symlink_to(PROGRAMS / "probe.py")
    py_compile.compile(str(PROGRAMS / "probe.py"), str(folder / "compiled.pyc"))
    zipapp.create_archive(folder / "nested", folder / "archive")
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("scene", SCENES)
def test_environment_signals_and_limits_reach_the_program(scene: str, stage: Path) -> None:
    plain = SCENES[scene].plain(stage)
    for start in ("forked", "exec") if scene not in BY_INTERPRETER else ("forked",):
        # What the light zygote has imported, and with it of warnings and atexit, is no more than the probe imports.
        assert_same(SCENES[scene].ranks(stage, start)[-1], plain)


def test_a_coerced_locale(stage: Path) -> None:
    """Where Python replaces the C locale it does so in the launcher already: only ``sys.flags.utf8_mode`` shows it."""
    scene = Scene(PROBE, {"LANG": "C", "LC_ALL": "", "LC_CTYPE": ""})
    plain, rank = scene.plain(stage), scene.ranks(stage, "forked")[-1]
    assert plain["environ"]["LC_CTYPE"] == "C.UTF-8"
    assert_same(rank, plain, but=("interpreter",))
    assert_same(rank["interpreter"], plain["interpreter"], but=("flags",))


@forked_and_exec
def test_a_single_rank_has_the_launchers_input(start: str, tmp_path: Path) -> None:
    words = ddplaunch_command("run", "--nproc", "1", *STARTS[start], PROBE[0])
    environment = clean_environment({"PROBE_OUT": str(tmp_path / "seen")})
    subprocess.run(words, env=environment, input=b"two\nlines", timeout=scaled_timeout(100), check=True)
    assert _seen(tmp_path / "seen0")["stdin"] == "two\nlines"


@forked_and_exec
def test_a_single_rank_has_the_launchers_terminal(start: str, tmp_path: Path) -> None:
    seen = {}
    for name, words in (
        ("plain", [sys.executable, *PROBE]),
        (start, ddplaunch_command("run", "--nproc", "1", *STARTS[start], *PROBE)),
    ):
        master, slave = pty.openpty()
        os.write(master, b"typed\n\x04")
        scene = Scene(PROBE, options={"stdin": slave, "stdout": slave, "stderr": slave})
        scene._run(words, tmp_path, name)
        os.close(slave)
        os.close(master)
        seen[name] = _seen(tmp_path / (name if name == "plain" else name + "0"))
    assert seen["plain"]["streams"]["stdout"]["line_buffering"]
    assert seen["plain"]["stdin"] == "typed\n"
    assert_same(seen[start], seen["plain"])


@forked_and_exec
def test_several_ranks_have_pipes_that_show_each_line_at_once(start: str, tmp_path: Path) -> None:
    """They have pipes, no terminal; their lines come at once, as on one."""
    master, slave = pty.openpty()
    options = {"stdin": slave, "stdout": slave, "stderr": slave}
    ranks = Scene(PROBE, options=options).ranks(tmp_path, start)
    os.close(slave)
    os.close(master)
    for rank in ranks:
        assert rank["streams"]["stdout"]["line_buffering"]
        assert not rank["streams"]["stdin"]["line_buffering"]
        assert rank["descriptors"]["1"] == "pipe"
        assert rank["stdin"] == ""


@forked_and_exec
def test_a_function_has_the_same_process(start: str, stage: Path) -> None:
    """Plain python cannot start a function; everything but its module is as for the script."""
    (rank,) = Scene(("nested/probe.py:main", "x"), nproc=1).ranks(stage, start)
    plain = Scene(("nested/probe.py", "x")).plain(stage)
    assert_same(rank, plain, but=("main", "argv", "orig_argv"))
    assert rank["argv"] == [str(stage / "nested" / "probe.py"), "x"]
    assert rank["main"]["__file__"] is None
    assert not rank["main"]["is ours"]


def test_a_program_has_the_signals_and_umask_of_a_plain_start(tmp_path: Path) -> None:
    shows = write_program(
        tmp_path, "shows", "#!/bin/sh\ngrep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; echo \"$0|$#|$2\"; umask\n"
    )
    shows.chmod(0o755)
    words = ["./shows", "one", "two three"]
    plain = run_command(words, tmp_path)
    options = ("--no-python", "--nproc", "1", "--preempt-signal", "none")
    ours = run_command(ddplaunch_command("run", *options, words[0], "--", *words[1:]), tmp_path)
    assert _without_libc_signals(ours.stdout) == _without_libc_signals(plain.stdout)
    assert ours.returncode == 0


def _without_libc_signals(status: str) -> list[str]:
    """posix_spawn(3) of glibc leaves its own two signals, 32 and 33, ignored; no program can see that but in /proc."""
    lines = []
    for line in status.splitlines():
        name, tab, mask = line.partition(":\t")
        lines.append(f"{name} {int(mask, 16) & ~(3 << 31):x}" if tab else line)
    return lines


# ---------------------------------------------------------------------------------------------- names of the user's

SHADOWS = (
    *("csv", "json", "worker", "zygote", "channel", "processes", "arguments", "click", "inspect", "traceback"),
    "ctypes",
)
SHADOWED_SCRIPT = """
    import sys
    import gc
    forked = gc.get_freeze_count() > 0
    for name in sys.argv[1:]:
        assert __import__(name).MINE == name, name
    print("forked" if forked else "fresh", "all mine")
    raise ValueError("shown without any of them")
"""


def installed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The launcher as its console script runs it: ``python -m`` would have it import the user's files itself."""
    script = "import sys; del sys.path[0]; from ddplaunch.cli import main; main()"
    return run_command([sys.executable, "-c", script, *words], folder, timeout=100)


@pytest.mark.ci
@pytest.mark.parametrize(("start", "how"), [("zygote", "forked"), ("forked", "forked"), ("exec", "fresh")])
def test_files_next_to_the_script_precede_modules_of_the_launcher(start: str, how: str, tmp_path: Path) -> None:
    for name in SHADOWS:
        write_program(tmp_path, f"{name}.py", f"MINE = {name!r}\n")
    write_program(tmp_path, "train.py", SHADOWED_SCRIPT)
    done = installed(tmp_path, "run", "--nproc", "1", *STARTS[start], "train.py", "--", *SHADOWS)
    assert done.stdout == f"{how} all mine\n"
    assert done.returncode == 1
    assert "failed with ValueError: shown without any of them" in done.stderr


@forked_and_exec
def test_files_next_to_a_function_precede_modules_of_the_launcher(start: str, tmp_path: Path) -> None:
    names = ["click", "plan", "errors", "arguments", "ddplaunch"]
    if start == "exec":
        names += ["inspect", "dataclasses", "typing"]
    for name in names:
        write_program(tmp_path, f"{name}.py", f"MINE = {name!r}\n")
    write_program(
        tmp_path,
        "train.py",
        """
        import click

        def main(rate: float, rank: int, names: str):
            import sys
            assert click is sys.modules["click"]
            assert sys.modules["train"].main is main
            for name in names.split(","):
                assert __import__(name).MINE == name, name
            print(rate * 2, rank, [name for name in sys.modules if name.startswith("ddplaunch.")])
        """,
    )
    words = ("--", "--rate", "0.5", "--names", ",".join(names))
    done = installed(tmp_path, "run", "--nproc", "1", *STARTS[start], "train.py:main", *words)
    assert (done.stdout, done.returncode) == ("1.0 0 []\n", 0), done.stderr


@pytest.mark.parametrize(("name", "start"), [("json", "forked"), ("two.dots", "exec")])
def test_a_function_may_be_in_a_file_of_any_name(name: str, start: str, tmp_path: Path) -> None:
    write_program(
        tmp_path,
        f"{name}.py",
        """
        import time
        from dataclasses import dataclass

        @dataclass
        class Config:
            rate: float = 0.5

        def main():
            print(__name__, Config(), hasattr(time, "sleep"))
        """,
    )
    done = installed(tmp_path, "run", "--nproc", "1", *STARTS[start], f"{name}.py:main")
    assert (done.stdout, done.returncode) == (f"{name} Config(rate=0.5) True\n", 0), done.stderr


# ------------------------------------------------------------------------------------------ what programs do


FEATURES = (
    *("process fork", "process spawn", "process forkserver", "pool fork", "pool spawn", "manager", "pickling"),
    *("source", "asyncio", "subprocess", "traceback", "warning"),
)


@pytest.mark.ci
def test_language_features_work_in_ranks(tmp_path: Path) -> None:
    scene = Scene((str(PROGRAMS / "features.py"),))
    plain = scene.plain(tmp_path)
    assert not [each for each in FEATURES if "Error" in str(plain[each]) and each != "traceback"]
    assert plain["stack"] == ["write_results", "<module>"]
    for rank in (*scene.ranks(tmp_path, "forked"), *scene.ranks(tmp_path, "exec")):
        assert {each: rank[each] for each in FEATURES} == {each: plain[each] for each in FEATURES}
        assert rank["stack"] == ["write_results", "<module>", "run_program", "<module>"]  # two frames of ours are below


RESULTS = {
    "compute": [2, 216000000.0, 216000000.0],
    "threads": [216000000.0] * 4,
    "learn": 4.0,
    "loader fork": [480.0, 2, False],
    "loader spawn": [480.0, 1, False],
    "loader forkserver": [480.0, 1, False],
    "share fork": [8.0, 8.0, 0],
    "share spawn": [8.0, 8.0, 0],
    "together": [3.0, 3.0, 3.0],
}


@pytest.mark.ci
@pytest.mark.parametrize("start", ["zygote", pytest.param("exec", marks=pytest.mark.ci)])
def test_torch_in_two_ranks(start: str, tmp_path: Path) -> None:
    """Threads, loaders and collectives work after a fork, and chance differs from rank to rank.

    A rank that was not forked starts other processes as in test_features: torch need not be imported for that.
    """
    words = ("fork",) if start == "exec" else ()
    without_import = {name: value for name, value in RESULTS.items() if not name.endswith(("spawn", "forkserver"))}
    scene = Scene((str(PROGRAMS / "torch_features.py"), *words), {"OMP_NUM_THREADS": "2"})
    one, two = scene.ranks(tmp_path, start)
    for rank, expected in ((one, without_import if words else RESULTS), (two, without_import)):
        assert {name: rank[name] for name in expected} == expected
    for generator in ("random", "numpy", "numpy generator", "torch"):
        assert one[generator] != two[generator], generator


# --------------------------------------------------------------------------------------------- what is known to differ


DIFFERS = {  # a plain program, a fork, a rank that is started by itself
    "torch": (False, False, False),
    "faulthandler": (False, True, True),
    "frozen": (False, True, False),
    "initial environment": (False, False, True),
    "terminal": (0, 0, 0),
    "leader": (True, True, True),
}
"""docs/fidelity.md says so: change both."""


@pytest.mark.ci
def test_what_differs_is_documented(tmp_path: Path) -> None:
    write_program(
        tmp_path,
        "differs.py",
        """
        import faulthandler, gc, json, os, sys, warnings
        class Here:
            pass
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("beyond the first frame", stacklevel=2)
        found = {
            "torch": "torch" in sys.modules,
            "faulthandler": faulthandler.is_enabled(),
            "frozen": gc.get_freeze_count() > 0,
            "initial environment": b"RANK=" in open("/proc/self/environ", "rb").read(),
            "hash": hash("text"),
            "warned": caught[0].filename,
            "terminal": int(open("/proc/self/stat").read().rpartition(")")[2].split()[4]),
            "leader": os.getsid(0) == os.getpid(),
        }
        json.dump(found, open(os.environ["PROBE_OUT"] + os.environ.get("RANK", ""), "w"))
        """,
    )
    scene = Scene(("differs.py",), {"PYTHONHASHSEED": "random"})
    plain, forked, fresh = scene.plain(tmp_path), scene.ranks(tmp_path, "zygote"), scene.ranks(tmp_path, "exec")
    for what, expected in DIFFERS.items():
        found = [{seen[what] for seen in each} for each in ([plain], forked, fresh)]
        assert found == [{each} for each in expected], what
    assert forked[0]["hash"] == forked[1]["hash"]
    assert fresh[0]["hash"] != fresh[1]["hash"]
    # Of a warning about the caller of the script.
    assert plain["warned"] in ("sys", "<sys>")  # the latter since Python 3.12
    for _, rank in (forked, fresh):
        assert rank["warned"].endswith("rank_runner.py")


@forked_and_exec
def test_a_fork_skips_the_end_of_modules_that_the_zygote_has_imported(
    start: str, tmp_path: Path, run_ddplaunch: Launch
) -> None:
    write_program(
        tmp_path,
        "train.py",
        """
        import ctypes, threading

        class Kept:
            def __del__(self):
                print("deleted")

        threading.kept = Kept()
        libc = ctypes.CDLL(None)
        libc.strdup.restype = ctypes.c_void_p
        libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"an exit handler in C")), None)
        """,
    )
    done = run_ddplaunch("run", "--nproc", "1", *STARTS[start], "train.py")
    assert done.stdout == ("" if start == "forked" else "deleted\nan exit handler in C\n")
    assert done.returncode == 0
