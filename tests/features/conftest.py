"""Fixtures that tests of several features share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.terminal_emulator import TerminalEmulator


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, empty."""
    path = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[Callable[..., TerminalEmulator]]:
    """Start commands, each in a terminal of its own, which is closed at the end."""
    begun: list[TerminalEmulator] = []

    def begin(words: Sequence[str], env: Mapping[str, str] | None = None, **size: int) -> TerminalEmulator:
        begun.append(TerminalEmulator(words, tmp_path, env, **size))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
