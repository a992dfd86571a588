"""The process on a node as ``doctor`` has it: a way to reach it, questions in, answers out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ddplaunch import __version__
from ddplaunch.commands.doctor.channels import Channel
from ddplaunch.commands.doctor.questions import MARK, Question, write_question
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import shown
from ddplaunch.plan.command import START_DEADLINE
from ddplaunch.wire.typed import parse

UNREADABLE = "ddplaunch cannot read the answer of this host"

_FAR = 10.0  # seconds beyond what a node may take for an answer
_ABSURD = re.compile(rb"\d{25}")  # a number of this many digits is none that a machine has, and arithmetic may fail

T = TypeVar("T")


class Unanswered(Exception):
    """A node did not answer, or nonsense; the text says why, for people."""


@dataclass(frozen=True)
class Reach:
    """A node, and how its process is reached."""

    name: str
    open: Callable[[], Channel]
    check: str = ""  # what a person may type to try to reach it


class Session:
    """One such process, from construction to ``close``; one thread at a time may ask."""

    def __init__(self, reach: Reach) -> None:
        self.name = reach.name
        self._channel = reach.open()

    def greet(self) -> None:
        """Wait until it has begun. Raises Unanswered, also if it is another version of us."""
        version = self._answer(str, START_DEADLINE)
        if version != __version__:
            raise Unanswered(f"ddplaunch {shown(version, 20)} there, {__version__} here")

    def ask(self, question: Question, kind: type[T], seconds: float) -> T:
        """Return the answer of a node that may take so many seconds for it. Raises Unanswered."""
        self._channel.send(write_question(question))
        return self._answer(kind, seconds + _FAR)

    def close(self) -> None:
        """End it."""
        self._channel.close()

    def _answer(self, kind: type[T], seconds: float) -> T:
        line = self._line(time.monotonic() + seconds)
        if line is None:
            raise Unanswered(f"no answer in {seconds:g} s")
        if not line:
            raise Unanswered(self._channel.why_ended())
        try:
            if not _ABSURD.search(line):
                return parse(line, kind)
        except (msgspec.MsgspecError, RecursionError):
            pass
        raise Unanswered(UNREADABLE)

    def _line(self, until: float) -> bytes | None:
        """Its next line that is ours; b"" at the end, None if it does not come in time."""
        while line := self._channel.line(until):
            if line.startswith(MARK):
                return line[len(MARK) :]
            if time.monotonic() > until:
                return None
        return line
