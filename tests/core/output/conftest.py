"""Fixture of tests of the output: a launcher in an emulated terminal."""

from __future__ import annotations

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
