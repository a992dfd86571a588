"""``ddplaunch debug`` at pytest's terminal, while ranks of a test are in their debugger."""

from __future__ import annotations

import bdb
import os
import subprocess
import sys
import threading

import pytest

from ddplaunch.plan.command import python_command

ATTACH_TEXT = " attaches"
"""How the launcher's note ends that a rank has stopped, and nobody is there."""


class ExaminedInDebugger(pytest.fail.Exception, bdb.BdbQuit):  # type: ignore[misc, name-defined]
    """A failure for which pytest's own debugger is not to come: the frames are in the rank."""

    __module__ = "builtins"  # as that of pytest.fail, by which it is shown


ExaminedInDebugger.__name__ = ExaminedInDebugger.__qualname__ = pytest.fail.Exception.__name__


class PytestDebugger:
    """Gives the terminal to ``ddplaunch debug`` when a rank stops, and takes it back when the test is over."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._lock = threading.Lock()
        self._client: subprocess.Popen[bytes] | None = None
        self._open = False
        self.post_mortem = bool(config.getoption("usepdb", False))
        self.is_available = self.post_mortem or (not hasattr(config, "workerinput") and self._at_terminal())

    def _at_terminal(self) -> bool:
        """Whether somebody can type: below pytest's capture stdin is /dev/null."""
        self._suspend()
        try:
            return os.isatty(0) and os.isatty(1)
        finally:
            self._resume()

    def _suspend(self) -> None:
        if self._capture is not None:
            self._capture.suspend(in_=True)

    def _resume(self) -> None:
        if self._capture is not None:
            self._capture.resume()

    def start_test(self) -> None:
        """A test's body starts."""
        self._open = True

    def on_note(self, pid: int, text: str) -> bool:
        """Take in what the launcher says, in the thread that reads it; whether a person sees it now."""
        with self._lock:
            if not (self._open and text.endswith(ATTACH_TEXT)):
                return False
            if self._client is None:
                self._suspend()
                self._config.get_terminal_writer().line()
                self._config.get_terminal_writer().sep(">", "ddplaunch debug (capture suspended)")
            elif self._client.poll() is None:
                return False
            self._client = subprocess.Popen([*python_command(sys.executable), "debug", str(pid)])
            return True

    def finish_test(self) -> None:
        """The test's body is over."""
        with self._lock:
            self._open = False
            client, self._client = self._client, None
        if client is not None:
            client.terminate()  # it sets the terminal back
            client.wait()
            self._config.get_terminal_writer().sep(">", "ddplaunch debug ends (capture resumed)")
            self._resume()
