"""The process on a node as ``doctor`` has it: a command that reaches it, questions in, answers out."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from typing import TypeVar

import msgspec

from ddplaunch import __version__
from ddplaunch.dataclass import dataclass
from ddplaunch.doctor.lines import Lines
from ddplaunch.doctor.questions import MARK, Question, write_question
from ddplaunch.errors import shown
from ddplaunch.plan.command import START_DEADLINE

_FAR = 10.0  # seconds beyond what a node may take for an answer
_LONGEST = 300  # characters of what others print that we quote
_HOLLOW = re.compile(r"^(Warning: Permanently added|srun: error: .*task.*Exited|Traceback|  )|exit status|exit code")

T = TypeVar("T")


class Unanswered(Exception):
    """A node did not answer; the text says why, for people."""


@dataclass(frozen=True)
class Reach:
    """A node, and the command that starts our process there."""

    name: str
    words: tuple[str, ...]
    check: str = ""  # what a person may type to try to reach it


class Session:
    """One such process, from construction to ``close``; one thread at a time may ask."""

    def __init__(self, reach: Reach) -> None:
        self.name = reach.name
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: at Ctrl-C we close its stdin, and it ends.
        self._process = subprocess.Popen(
            reach.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
            start_new_session=True,
        )
        self._lines = Lines(self._process.stdout)

    def greet(self) -> None:
        """Wait until it has begun. Raises Unanswered, also if it is another version of us."""
        version = self._answer(str, START_DEADLINE)
        if version != __version__:
            raise Unanswered(f"ddplaunch {shown(version, 20)} there, {__version__} here")

    def ask(self, question: Question, kind: type[T], seconds: float) -> T:
        """Return the answer of a node that may take so many seconds for it. Raises Unanswered."""
        assert self._process.stdin
        try:
            self._process.stdin.write(write_question(question))
        except OSError:  # it has ended, as the answer says
            pass
        return self._answer(kind, seconds + _FAR)

    def _answer(self, kind: type[T], seconds: float) -> T:
        line = self._line(time.monotonic() + seconds)
        if line is None:
            raise Unanswered(f"no answer in {seconds:g} s")
        if not line:
            raise Unanswered(self._why_ended())
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError:
            raise Unanswered("ddplaunch cannot read the answer of this host") from None

    def _line(self, until: float) -> bytes | None:
        """Its next line that is ours; b"" at the end, None if it does not come in time."""
        while line := self._lines.next(until):
            if line.startswith(MARK):
                return line[len(MARK) :]
        return line

    def _why_ended(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").splitlines()
        if any(re.search("No module named '?ddplaunch", line) for line in said):
            return "ddplaunch is not installed for this Python there (--remote-python names another)"
        telling = [line for line in said if line.strip() and not _HOLLOW.search(line)] or said
        last = shown(telling[-1], _LONGEST) if telling else f"it ended without a message (exit code {code})"
        return f"{last} (--remote-python names another Python)" if code in (126, 127) else last

    def close(self) -> None:
        """End it: its stdin closes, and with that all that it has started; what reaches it is killed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()
