"""Shared fixtures and helpers: run the real command, and check that no process or file of it is left."""

import fcntl
import itertools
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import textwrap
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.features.ssh.fixture import sshd  # noqa: F401
from tests.fork_server import TORCHRUN, ForkServerPool
from tests.scaled_timeouts import scaled_timeout
from tests.tools.slurm.fixture import _standing, slurm, standing_slurm  # noqa: F401
from tests.tools.virtual_hosts.fixture import network  # noqa: F401 - a fixture is found by its name here

pytest_plugins = [
    f"tests.suite.{name}"
    for name in ("rerun_failures", "run_temp_dir", "time_limit", "time_spent", "selection", "warm")
]

PROGRAMS = Path(__file__).parent / "programs"
"""Small user programs that the tests start."""

# A shell ignores these in what it starts in the background, and what ignores them hands that on to all that we start.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),  # nohup does too
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Some machines say that no bytecode is to be kept, which makes each start of ours three times as long as any user's.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# The GPUs of a machine would change the plans, devices and notes of tests that simulate none (tests/fake_nvml.py).
os.environ["CUDA_VISIBLE_DEVICES"] = ""

STORE = "ddplaunch: store of a run"
"""The command line of the process that holds a job's store."""

_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without variables that would change a plan, with ``extra`` added."""
    environment = {name: value for name, value in os.environ.items() if name not in _INHERITED}
    environment.pop("PYTHONUNBUFFERED", None)
    if "FAKE_NVML_GPUS" in (extra or {}):
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    return {**environment, **(extra or {})}


def ddplaunch_command(*words: str | Path) -> list[str]:
    """The ``ddplaunch`` command line, run by this interpreter."""
    return [sys.executable, "-m", "ddplaunch", *map(str, words)]


def torchrun_command(folder: Path, *words: str | Path, nproc: int = 2) -> list[str]:
    """The ``torchrun`` command line, run by this interpreter; its folder of logs is in ``folder``."""
    options = ("--standalone", f"--nproc-per-node={nproc}", "--log-dir", str(folder / "torchrun"))
    return [sys.executable, "-m", "torch.distributed.run", *options, *map(str, words)]


def run_command(
    words: Sequence[str | Path],
    folder: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = 60,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run any command until it ends, return it with its output as text; ``env`` is added to a clean environment."""
    stdin = {} if "input" in more else {"stdin": subprocess.DEVNULL}
    options = {"cwd": folder, "env": clean_environment(env), "capture_output": True, "text": True, **stdin, **more}
    return subprocess.run(words, timeout=scaled_timeout(timeout), **options)


def run_in_terminal(
    words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, columns: int = 80, typed: str = ""
) -> str:
    """Run any command until it ends in a terminal of ``columns``; return its output, and the echo."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = clean_environment({"TERM": "xterm-256color", "NO_COLOR": "", **(env or {})})
    for name in ("COLUMNS", "LINES"):  # which go before what the terminal says
        environment.pop(name, None)
    written = b""
    with subprocess.Popen(words, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        os.write(ours, typed.encode())
        with suppress(OSError):  # EIO: the last process that had the terminal open is gone
            while part := os.read(ours, 1 << 16):
                written += part
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


SLOW_START = re.compile(r"^ddplaunch: starting \d+ ranks?: (?:importing|waiting for) .*\n", re.MULTILINE)

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_ddplaunch(tmp_path: Path) -> Launch:
    """Run ``ddplaunch WORDS`` to its end in ``tmp_path`` and return it with its output as text.

    Its stderr is without messages about a slow start, which depend on the load of this machine.
    """

    def run(
        *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        done = run_command(ddplaunch_command(*words), cwd or tmp_path, env, timeout=timeout, errors="surrogateescape")
        done.stderr = SLOW_START.sub("", done.stderr)
        return done

    return run


@pytest.fixture(scope="session")
def _commands() -> Iterator[ForkServerPool]:
    commands = ForkServerPool()
    yield commands
    commands.close()


@pytest.fixture(scope="session", autouse=True)
def _torchrun() -> Iterator[None]:
    yield
    TORCHRUN.close()


@pytest.fixture
def run_in_fork(_commands: ForkServerPool, tmp_path: Path) -> Launch:
    """As ``run_ddplaunch``, but fast, in a fork: for commands that start no ranks."""

    def run(
        *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return _commands.run([*map(str, words)], cwd or tmp_path, clean_environment(env), scaled_timeout(timeout))

    return run


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> str:
    """Assert that a command has ended with a usage error whose message has all these words; return its stderr."""
    assert (done.returncode, done.stdout) == (2, ""), done
    refusal = done.stderr[done.stderr.index("Error: ") :]
    assert len(refusal.splitlines()) <= 3, refusal
    assert "Traceback" not in refusal
    for part in parts:
        assert part in done.stderr
    return done.stderr


def conflict(option: str, other: str) -> str:
    """The message that refuses two options together, without the reason that may follow."""
    return f"{option} does not work with {other}"


NEWEST = "the newest run of this folder"
"""What a command without a run's name writes first, and then the run that it found."""


def write_program(folder: Path, name: str, text: str) -> Path:
    """Write a small program, dedented, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def list_marked_pids(mark: str, variable: str = "DDPLAUNCH_TEST_MARK") -> Sequence[int]:
    """The pids of all live processes with ``mark`` in their environment: set it on the launcher to find its own."""
    wanted = f"{variable}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marked = wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and is_alive(int(entry.name)):
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60) -> None:
    """Poll until a condition is true; fail with ``what`` after the timeout."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + scaled_timeout(timeout):
            pytest.fail(f"waited {time.monotonic() - began:.0f} s for {what}")
        time.sleep(0.01)


def wait_until_idle(*pids: int, seconds: float = 2) -> None:
    """Wait until these processes have slept for ``seconds``: no context switch of their own."""

    def count_switches() -> list[str]:
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return [text.partition("\nvoluntary_ctxt_switches:\t")[2].split()[0] for text in texts]

    def have_slept() -> bool:
        before = count_switches()
        time.sleep(seconds)  # the thing measured is that nothing happens for a while
        return count_switches() == before

    wait_until(have_slept, f"{seconds:.1f} s without a context switch of {pids}", 20)


_ports = itertools.count(20000 + os.getpid() * 8 % 10000, 2)
_marks: deque[socket.socket] = deque(maxlen=32)  # of the ports given last: tests run in several processes at a time


def free_port() -> int:
    """Return a free port whose successor is free too, outside the kernel's ephemeral range."""
    for port in _ports:
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0a port of ddplaunch's tests: {port}")  # for as long as this process has it open
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
        except OSError:
            mark.close()
            continue
        _marks.append(mark)
        return port
    raise AssertionError


def read_events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Read the events of the only run with a log below a folder, or those of these kinds."""
    (log,) = folder.rglob("events*.jsonl")
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [event for event in found if not kinds or event["event"] in kinds]


class BackgroundCommand:
    """A command that runs in the background, whose output goes into files."""

    out: Path
    err: Path
    process: subprocess.Popen[Any]
    path: str  # of its control socket, where a test has looked for it

    def stdout(self) -> str:
        return self.out.read_text(errors="surrogateescape")

    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return SLOW_START.sub("", self.err.read_text(errors="surrogateescape"))

    def wait_for(self, text: str, times: int = 1, timeout: float = 60) -> None:
        """Wait until stdout holds ``text`` ``times`` times."""

        def seen() -> bool:
            if self.stdout().count(text) >= times:
                return True
            if self.process.poll() is not None and self.stdout().count(text) < times:
                pytest.fail(f"it ended ({self.process.returncode}) before {text!r} x {times}: {self.stderr()}")
            return False

        wait_until(seen, f"{text!r} x {times} in {self.out}", timeout)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        return self.process.wait(scaled_timeout(timeout))


class BackgroundJob(BackgroundCommand):
    """A launcher in the background; its processes are found by a variable in their environment."""

    def __init__(
        self, folder: Path, words: Sequence[str | Path], env: Mapping[str, str] | None, **options: Any
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.out, self.err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self.tmp = folder / f"{self.mark}.tmp"
        self.tmp.mkdir()
        environment = clean_environment({"DDPLAUNCH_TEST_MARK": self.mark, "TMPDIR": str(self.tmp), **(env or {})})
        with self.out.open("wb") as out, self.err.open("wb") as err:
            given = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(ddplaunch_command(*words), **{**given, **options})

    def zygote(self) -> int:
        """Wait for its zygote and return its pid; between fork and exec it looks like the launcher."""

        def found() -> list[int]:
            return self.find("zygote.py")

        wait_until(found, "the zygote")
        return min(found())

    def ranks(self) -> list[int]:
        """Return the pids of its ranks, from the children of its zygote."""
        children = Path(f"/proc/{self.zygote()}/task/{self.zygote()}/children").read_text().split()
        return [int(pid) for pid in children if not _cmdline(int(pid)).startswith(STORE)]

    def store(self) -> int:
        """Wait for the process that holds its store and return its pid."""
        wait_until(lambda: self.find(STORE), "the store")
        (pid,) = self.find(STORE)
        return pid

    def left(self) -> Sequence[int]:
        return find_leftover_processes(self.mark)

    def find(self, text: str) -> list[int]:
        """Return its processes with this text in their command lines."""
        return find_marked_processes(self.mark, text)

    def assert_nothing_left(self, timeout: float = 10) -> None:
        """Assert that no process and no temporary file of it is left."""
        wait_until(lambda: not self.left(), f"the end of {[_cmdline(pid) for pid in self.left()]}", timeout)
        wait_until(lambda: not list(self.tmp.iterdir()), f"the removal of {list(self.tmp.iterdir())}", timeout)


def find_leftover_processes(mark: str) -> list[int]:
    """Return the processes with ``mark`` without warm zygotes, which are meant to stay."""
    return [pid for pid in list_marked_pids(mark) if _cmdline(pid).strip() != "ddplaunch: warm zygote"]


def find_marked_processes(mark: str, text: str) -> list[int]:
    """Return the processes with ``mark`` that have this text in their command lines."""
    return [pid for pid in find_leftover_processes(mark) if text in _cmdline(pid)]


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"


@pytest.fixture
def start_ddplaunch(tmp_path: Path) -> Iterator[Callable[..., BackgroundJob]]:
    """Start ``ddplaunch WORDS`` in the background; whatever a failed test leaves is killed."""
    jobs: list[BackgroundJob] = []

    def begin(*words: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> BackgroundJob:
        jobs.append(BackgroundJob(tmp_path, words, env, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        for pid in job.left():
            with suppress(ProcessLookupError):  # it went with one that was killed before it
                os.kill(pid, signal.SIGKILL)
        job.process.wait()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, empty."""
    path = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path
