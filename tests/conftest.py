"""What all tests share: running the real command, and making sure that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
"""Small user programs that the tests start."""

_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "CUDA_VISIBLE_DEVICES")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our own environment without what would change a plan, with ``extra`` on top."""
    environment = {name: value for name, value in os.environ.items() if name not in _INHERITED}
    environment.pop("PYTHONUNBUFFERED", None)
    return {**environment, **(extra or {})}


def command(*words: str | Path) -> list[str]:
    """The ``ddplaunch`` command line, run by this interpreter."""
    return [sys.executable, "-m", "ddplaunch", *map(str, words)]


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run ``ddplaunch WORDS`` to its end in ``tmp_path`` and return it with its output as text."""

    def run(
        *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*words),
            cwd=cwd or tmp_path,
            env=clean_environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            errors="surrogateescape",
        )

    return run


def write(folder: Path, name: str, text: str) -> Path:
    """Write a small program, dedented, and return its path."""
    import textwrap

    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def processes_marked(mark: str, variable: str = "DDPLAUNCH_TEST_MARK") -> Sequence[int]:
    """The pids of all live processes that have ``mark`` in their environment: set it on the launcher to find its own."""
    wanted = f"{variable}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marked = wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and alive(int(entry.name)):
            found.append(int(entry.name))
    return found
