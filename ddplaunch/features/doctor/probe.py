"""Helper process for calls that may hang: a wedged driver or a dead file server blocks only the child."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.base.types import parse
from ddplaunch.system.plan.launch_command import START_TIMEOUT_S, python_command
from ddplaunch.system.processes.proc_utils import die_with_parent

REPLY_TIMEOUT_S = 5.0  # for one reply
TORCH_IMPORT_TIMEOUT_S = 90.0  # for the import of torch


_CALL = "from ddplaunch.features.doctor.probe import run_named_function; run_named_function()"

T = TypeVar("T")


def start_json_output() -> Callable[[object], object]:
    """Called in the helper process: print that it has started; return a function that prints values as JSON."""
    out = os.dup(1)
    os.dup2(2, 1)  # for everything else that prints
    os.write(out, b'"begun"\n')
    return lambda answer: os.write(out, msgspec.json.encode(answer) + b"\n")


def run_named_function() -> None:
    """Called in the helper process: call the function that sys.argv names, and print its result."""
    reply = start_json_output()
    module, name, *words = sys.argv[1:]
    reply(getattr(importlib.import_module(module), name)(*words))
    os._exit(0)  # torch would take its time to exit


class HelperProbe:
    """A helper process, started by the constructor: it reads and writes lines of JSON."""

    def __init__(self, statement: str, *words: str) -> None:
        """``statement``: a Python statement; ``words``: its sys.argv."""
        self.timed_out = False  # whether the last read timed out
        self._text = b""
        self._ended = False
        self._loop = EventLoop()
        self._child = HelperProcess(
            self._loop,
            [*python_command(sys.executable, statement), *words],
            self._on_output,
            self._on_timeout,
            deadline=None,
            pipe_stdin=True,
            preexec_fn=die_with_parent,
        )

    @classmethod
    def for_function(cls, function: Callable[..., object], *words: str) -> HelperProbe:
        """Start a helper process that calls this module-level function with these arguments."""
        return cls(_CALL, function.__module__, function.__name__, *words)

    def write_task(self, task: object) -> None:
        self._child.write(msgspec.json.encode(task) + b"\n")

    def read(self, kind: type[T], timeout_s: float) -> T | None:
        """Read the next line as a ``kind``; None after ``timeout_s`` (sets ``timed_out``), or if it is invalid."""
        self.timed_out = False
        self._child.set_deadline(timeout_s)
        while b"\n" not in self._text and not self.timed_out and not self._ended:
            self._loop.run_once()
        line, end, self._text = self._text.partition(b"\n")
        with suppress(ProtocolError):
            return parse(line, kind) if end else None
        return None

    def read_result(self, kind: type[T], timeout_s: float) -> T | None:
        """Read the result of the function like ``read``, within ``timeout_s`` of its start; then end the process."""
        answer = self.read_first_line(kind, timeout_s)
        self._child.close()
        return answer

    def read_first_line(self, kind: type[T], timeout_s: float) -> T | None:
        """Read the first line like ``read``, within ``timeout_s`` of the start; the process keeps running."""
        return self.read(kind, timeout_s) if self.read(str, START_TIMEOUT_S) else None

    def close(self) -> None:
        self._child.close()

    def _on_output(self, data: bytes) -> None:
        self._text += data
        self._ended = not data

    def _on_timeout(self) -> None:
        self.timed_out = True
