"""Fixtures of tests of the output: a launcher in an emulated terminal, and a small disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ddplaunch_command
from tests.terminal_emulator import TerminalEmulator

StartInTerminal = Callable[..., TerminalEmulator]


@pytest.fixture
def start_in_terminal(tmp_path: Path) -> Iterator[StartInTerminal]:
    """Start ``ddplaunch run WORDS``, or another launcher, in an emulated terminal."""
    with ExitStack() as stack:

        def start(
            *words: str | Path, launcher: Path | None = None, columns: int = 100, env: dict[str, str] | None = None
        ) -> TerminalEmulator:
            command = ddplaunch_command("run", *words)
            if launcher is not None:
                command[0] = str(launcher)
            terminal = TerminalEmulator(command, tmp_path, env, columns=columns)
            stack.callback(terminal.close)
            return terminal

        yield start


@pytest.fixture
def mount_small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of this size ("64k")."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()

    def mount(size: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(small)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a small file system here")
        return small

    yield mount
    if os.path.ismount(small):
        subprocess.run(["umount", small], check=True)
