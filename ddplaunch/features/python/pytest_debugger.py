"""Runs ``ddplaunch debug`` at pytest's terminal while ranks of a test are in the debugger."""

from __future__ import annotations

import bdb
import os
import subprocess
import sys
import threading

import pytest

from ddplaunch.cli import launcher_command

ATTACH_TEXT = "`ddplaunch debug "
"""A part of the launcher's note that a rank has stopped and no user is attached."""


class ExaminedInDebugger(pytest.fail.Exception, bdb.BdbQuit):  # type: ignore[misc, name-defined]
    """A failure for which pytest must not start its own debugger: the frames are in the rank."""

    __module__ = "builtins"  # like that of pytest.fail, so that it is shown in the same way


ExaminedInDebugger.__name__ = ExaminedInDebugger.__qualname__ = pytest.fail.Exception.__name__


class PytestDebugger:
    """Starts ``ddplaunch debug`` on the terminal when a rank stops, and ends it after the test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._lock = threading.Lock()
        self._client: subprocess.Popen[bytes] | None = None
        self._test_runs = False
        self.post_mortem = bool(config.getoption("usepdb", False))
        self.is_available = self.post_mortem or (not hasattr(config, "workerinput") and self._has_terminal())

    def _has_terminal(self) -> bool:
        """Whether stdin and stdout are a terminal without pytest's capture, which sets stdin to /dev/null."""
        self._set_capture_suspended(True)
        try:
            return os.isatty(0) and os.isatty(1)
        finally:
            self._set_capture_suspended(False)

    def _set_capture_suspended(self, on: bool) -> None:
        if self._capture is not None:
            self._capture.suspend(in_=True) if on else self._capture.resume()

    def start_test(self) -> None:
        """Called before a test's body runs."""
        self._test_runs = True

    def on_note(self, pid: int, text: str) -> bool:
        """Called with each note of the launcher, in a reader thread; return whether this has started a debug client."""
        with self._lock:
            if not (self._test_runs and ATTACH_TEXT in text):
                return False
            if self._client is None:
                self._set_capture_suspended(True)
                self._config.get_terminal_writer().line()
                self._config.get_terminal_writer().sep(">", "ddplaunch debug (capture suspended)")
            elif self._client.poll() is None:
                return False
            self._client = subprocess.Popen([*launcher_command(sys.executable), "debug", str(pid)])
            return True

    def finish_test(self) -> None:
        """Called after a test's body has run: end the debug client, and resume capturing."""
        with self._lock:
            self._test_runs = False
            client, self._client = self._client, None
        if client is not None:
            client.terminate()  # it restores the terminal settings
            client.wait()
            self._config.get_terminal_writer().sep(">", "ddplaunch debug ends (capture resumed)")
            self._set_capture_suspended(False)
