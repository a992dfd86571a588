"""Tests of the debugger of ranks under pytest: ``--pdb`` and ``breakpoint()`` in marked tests, at a real terminal."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.features.python import pytest_debugger
from ddplaunch.features.python.pytest_debugger import PytestDebugger
from tests.conftest import run_command, write_program
from tests.terminal_emulator import TerminalEmulator

QUIET = ("-p", "no:cacheprovider", "-p", "no:hydra_pytest", "test_it.py")

FAILS = """
import pytest

@pytest.mark.ranks(2)
def test_sum(rank):
    values = [rank, 40]
    print("values", values)
    assert sum(values) < 41, "too big"

@pytest.mark.ranks(2)
def test_again(rank):
    assert not rank, "one"

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_expected(rank):
    assert rank

@pytest.mark.ranks(2)
def test_after(rank):
    pass
"""

STOPS = """
import pytest

@pytest.mark.ranks(2)
@pytest.mark.parametrize("base", [40, 50])
def test_stop(rank, base):
    mine = rank + base
    if rank == 1:
        breakpoint()
    assert mine < 100

@pytest.mark.ranks(2)
def test_after(rank):
    pass
"""

StartPytest = Callable[..., TerminalEmulator]


@pytest.fixture
def start_pytest(at_terminal, tmp_path: Path) -> StartPytest:
    """Start pytest on a test in a terminal."""

    def start(body: str, *words: str) -> TerminalEmulator:
        write_program(tmp_path, "test_it.py", body)
        return at_terminal([sys.executable, "-m", "pytest", *words, *QUIET], columns=100, rows=60)

    return start


@pytest.mark.ci
def test_pdb_opens_at_the_rank_that_failed(start_pytest: StartPytest):
    """``--pdb`` opens the debugger in the rank that failed, then the test fails; an expected failure opens none."""
    pytest_ = start_pytest(FAILS, "--pdb")
    pytest_.until("(rank 1)", 60)
    pytest_.type("p values, rank\r")
    pytest_.until("([1, 40], 1)")
    pytest_.type("q\r")
    pytest_.until("AssertionError: one", 60)
    pytest_.until(lambda each: each.rows[-1] == "(rank 1)")
    pytest_.type("c\r")
    rows = pytest_.until("2 failed, 1 passed, 1 xfailed", 60)
    assert any("AssertionError: too big (exit code 1) (rank 1)" in row for row in rows)
    assert not any("Pdb" in row for row in rows)
    assert pytest_.settings == pytest_.before


@pytest.mark.ci
@pytest.mark.parametrize("words", [(), pytest.param(("-s",), marks=pytest.mark.ci)])
def test_a_breakpoint_in_a_marked_test_stops_at_the_prompt(start_pytest: StartPytest, words: tuple[str, ...]):
    """Quitting the debugger fails the test."""
    pytest_ = start_pytest(STOPS, *words)
    pytest_.until("(rank 1)", 60)
    pytest_.type("p mine\r")
    pytest_.until("41")
    pytest_.type("c\r")
    pytest_.until(lambda each: sum("capture suspended" in row for row in each.history) == 2, 60)
    pytest_.until(lambda each: each.rows[-1] == "(rank 1)")
    pytest_.type("p mine\r")
    pytest_.until("51")
    pytest_.type("q\r")
    pytest_.until("1 failed, 2 passed", 60)
    assert any("ddplaunch debug ends" in row for row in pytest_.history)
    assert pytest_.settings == pytest_.before


def test_the_client_has_the_terminal_until_the_end_of_the_test(monkeypatch):
    """It is started again at the next breakpoint after the user has left it."""
    events: list[str] = []

    class Client:
        def __init__(self, argv):
            events.append(" ".join(argv[-2:]))
            self.code = None

        def poll(self):
            return self.code

        def terminate(self):
            events.append("terminated")

        def wait(self):
            events.append("waited for")

    capture = SimpleNamespace(
        suspend=lambda in_: events.append(f"suspend, stdin too: {in_}"), resume=lambda: events.append("resume")
    )
    writer = SimpleNamespace(line=lambda: None, sep=lambda rule, title: events.append(title))
    config = SimpleNamespace(
        getoption=lambda name, default: True,
        pluginmanager=SimpleNamespace(getplugin=lambda name: capture),
        get_terminal_writer=lambda: writer,
    )
    monkeypatch.setattr(pytest_debugger.subprocess, "Popen", Client)
    debugger = PytestDebugger(cast("Any", config))
    assert (debugger.post_mortem, debugger.is_available) == (True, True)
    note = "rank 1 has stopped: type `ddplaunch debug 7`"
    assert not debugger.on_note(7, note), "no test runs"
    debugger.start_test()
    assert not debugger.on_note(7, "another note")
    assert events == []
    assert debugger.on_note(7, note)
    assert not debugger.on_note(7, note), "the client is there"
    debugger._client.code = 0
    assert debugger.on_note(7, note)
    began = ["suspend, stdin too: True", "ddplaunch debug (capture suspended)", "debug 7", "debug 7"]
    assert events == began
    debugger.finish_test()
    assert events[4:] == ["terminated", "waited for", "ddplaunch debug ends (capture resumed)", "resume"]
    debugger.finish_test()
    assert not debugger.on_note(7, note)
    assert len(events) == 8


@pytest.mark.ci
def test_refused(tmp_path: Path):
    write_program(tmp_path, "test_it.py", STOPS)
    done = run_command([sys.executable, "-m", "pytest", "--trace", *QUIET], tmp_path, timeout=100)
    expected = "--trace does not work with @pytest.mark.ranks: write breakpoint() in the test"
    assert expected in done.stdout + done.stderr
