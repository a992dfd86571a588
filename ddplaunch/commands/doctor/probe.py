"""A child process that is asked and may never answer: a wedged driver or a dead file server holds up only the child."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar, cast

import msgspec

from ddplaunch.loop import Loop
from ddplaunch.plan.command import START_DEADLINE, python_command
from ddplaunch.rank.processes import die_with_parent
from ddplaunch.wire.child import AskedChild
from ddplaunch.wire.frames import Garbled
from ddplaunch.wire.typed import convert

DEADLINE = 5.0  # seconds for an answer
TORCH_DEADLINE = 90.0  # seconds for torch to be imported


_CALL = "from ddplaunch.commands.doctor.probe import call; call()"

T = TypeVar("T")


def begun() -> Callable[[object], object]:
    """In a child: say that it has begun, and return what prints a line of JSON."""
    out = os.dup(1)
    os.dup2(2, 1)  # for all else that prints
    os.write(out, b'"begun"\n')
    return lambda answer: os.write(out, msgspec.json.encode(answer) + b"\n")


def call() -> None:
    """In the child: call the function that our arguments name, and print what it returns."""
    say = begun()
    module, name, *words = sys.argv[1:]
    say(getattr(importlib.import_module(module), name)(*words))
    os._exit(0)  # torch would take its time to end


class Probe:
    """One child, begun as it is made: lines go in, lines come out."""

    def __init__(self, statement: str, *words: str, environ: Mapping[str, str] | None = None) -> None:
        """``statement`` is of Python, and ``words`` its arguments."""
        self.late = False  # whether its last answer did not come in time
        self._text = b""
        self._ended = False
        self._loop = Loop()
        self._child = AskedChild(
            self._loop,
            [*python_command(sys.executable, statement), *words],
            self._heard,
            self._overdue,
            deadline=None,
            asks=True,
            environ=environ,
            begun=die_with_parent,
        )

    @classmethod
    def of(cls, function: Callable[..., object], *words: str) -> Probe:
        """One that calls a function of ours with these words."""
        return cls(_CALL, function.__module__, function.__name__, *words)

    def ask(self, task: object) -> None:
        self._child.ask(msgspec.json.encode(task) + b"\n")

    def read(self, kind: type[T], seconds: float) -> T | None:
        """Its next line as a ``kind``; None if none comes within so many seconds (``late``), or another one."""
        self.late = False
        self._child.wait(seconds)
        while b"\n" not in self._text and not self.late and not self._ended:
            self._loop.step()
        line, end, self._text = self._text.partition(b"\n")
        with suppress(msgspec.MsgspecError, Garbled):
            return cast(T, convert(msgspec.json.decode(line), kind)) if end else None
        return None

    def answer(self, kind: type[T], seconds: float) -> T | None:
        """What the function returns within so many seconds of its start; as ``read``."""
        answer = self.begin(kind, seconds)
        self._child.close()
        return answer

    def begin(self, kind: type[T], seconds: float) -> T | None:
        """Its first line, as ``read``, within so many seconds of its start: then it goes on."""
        return self.read(kind, seconds) if self.read(str, START_DEADLINE) else None

    def end(self) -> None:
        self._child.close()

    def _heard(self, data: bytes) -> None:
        self._text += data
        self._ended = not data

    def _overdue(self) -> None:
        self.late = True
