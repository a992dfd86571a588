"""Fixtures: a shell that leads a session, and a stand-in for torch whose import takes no time."""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import clean_environment, ddplaunch_command, is_alive, wait_until, write_program
from tests.constant_override import write_launcher
from tests.scaled_timeouts import scaled_timeout

BUSY = "the warm zygote was busy"
"""Why a run did not use a warm zygote that did not reply in time."""

TORCH = """
import os
made = os.getpid()  # of the process that imported it: equal in all runs that one warm zygote has served

class default_generator:
    seed = staticmethod(int)
"""

SHOWS = "import os, torch\nprint('made', torch.made, 'rank', os.environ['RANK'], flush=True)\n"


WAITS = SHOWS + "import time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n"


class RunResult(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def made(self) -> int:
        """The process that imported torch for its ranks."""
        (made,) = set(re.findall(r"made (\d+)", self.stdout)) or [self.stderr]
        return int(made)


class Shell:
    """Runs lines of sh in ``folder``; its warm zygotes have a folder of their own."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.runtime = Path(tempfile.mkdtemp(prefix="warm-"))
        self.modules = folder / "modules"
        write_program(self.modules, "torch/__init__.py", TORCH)
        write_program(folder, "shows.py", SHOWS)
        self.env = clean_environment(
            {"XDG_RUNTIME_DIR": str(self.runtime), "PYTHONPATH": str(self.modules), "HOME": str(folder), **(env or {})}
        )
        self.launcher = self.set_reply_timeout(scaled_timeout(5))
        self._numbers = itertools.count()
        self.started: list[int] = []
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = subprocess.Popen(
            ["sh"], cwd=folder, env=self.env, start_new_session=True, **pipes
        )

    def _type(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def set_reply_timeout(self, seconds: float) -> Path:
        """Write the launcher, which waits ``seconds`` for a reply of a zygote: short where none comes."""
        return write_launcher(
            self.folder / "bin",
            f"""
            from ddplaunch.base import local_sockets

            candidates = local_sockets.socket_dir_candidates
            local_sockets.socket_dir_candidates = lambda name: candidates(name)[:1]  # not those of this user in /tmp

            from ddplaunch.features.warm import warm_client

            warm_client.REPLY_TIMEOUT_S = {seconds}
            """,
        )

    def torch_also(self, text: str) -> None:
        """Add code to the import of the stand-in for torch."""
        path = self.modules / "torch/__init__.py"
        path.write_text(path.read_text() + text)

    def run(self, line: str = "", *, before: str = "", after: str = "") -> RunResult:
        """Run a line, by default ``ddplaunch run --warm`` of a program that prints the process which imported torch."""
        out, err = (self.folder / f"{next(self._numbers)}.{name}" for name in ("out", "err"))
        command = line or f"{before} {self.launch('shows.py')} {after}"
        code = self._type(f"( {command} ) </dev/null >{out} 2>{err}; echo $?")
        return RunResult(int(code), out.read_text(errors="replace"), err.read_text(errors="replace"))

    def begin(self, line: str) -> tuple[int, Path]:
        """Start a command in the background; return its pid and the file of all that it prints."""
        out = self.folder / f"{next(self._numbers)}.all"
        self.started += [int(self._type(f"{line} </dev/null >{out} 2>&1 & echo $!"))]
        return self.started[-1], out

    def launch(self, *words: str | Path) -> str:
        return self.command("run", "--warm", "--nproc", "2", *words)

    def command(self, *words: str | Path) -> str:
        _, *others = ddplaunch_command(*words)
        return shlex.join([str(self.launcher), *others])

    def warm(self, *words: str) -> RunResult:
        return self.run(self.command("warm", *words))

    def list_zygotes(self) -> list[int]:
        """Return the pids of the warm zygotes."""
        return [int(line.split()[0]) for line in self.warm().stdout.splitlines()[1:]]

    def reasons(self, log: str) -> list[str]:
        """Return why the runs with ``--log-dir log`` used no warm zygote."""
        events = (path.read_text() for path in (self.folder / log).rglob("events*.jsonl"))
        return re.findall(r'"cold": "(.*?)"', "".join(events))

    def log_out(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def close(self) -> None:
        for pid in filter(is_alive, self.started):
            os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.warm("--stop")
            self.process.communicate()
        shutil.rmtree(self.runtime, ignore_errors=True)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell for all tests of a module, which do not change it."""
    shell = Shell(tmp_path_factory.mktemp("shared"))
    yield shell
    shell.close()


def wait_for_exit(*pids: int) -> None:
    for pid in pids:
        wait_until(partial(_is_gone, pid), f"the end of {pid}")


def _is_gone(pid: int) -> bool:
    return not is_alive(pid)


def wait_for_text(file: Path, text: str, times: int = 1) -> str:
    """Wait until a file holds ``text`` ``times`` times; return all of it."""
    wait_until(
        lambda: file.exists() and file.read_text(errors="replace").count(text) >= times, f"{text!r} x {times} in {file}"
    )
    return file.read_text(errors="replace")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


ROOT = os.geteuid() == 0
