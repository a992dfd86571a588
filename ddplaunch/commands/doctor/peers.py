"""The nodes as the doctor reaches them: a connection to a process on each, which answers one question at a time."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ddplaunch import __version__
from ddplaunch.commands.doctor.messages import MARK, Leave, NodeAnswer, Present, Question
from ddplaunch.errors import shown
from ddplaunch.loop import Loop
from ddplaunch.plan.command import START_DEADLINE
from ddplaunch.ssh.client import LONGEST_COMPLAINT, why_ended
from ddplaunch.wire.connection import Connection

UNREADABLE = "ddplaunch cannot read the answer of this host"

END_PATIENCE = 2.0  # seconds for a command to end once its stdin is closed
_HOLLOW = re.compile(r"^(Warning: Permanently added|srun: error: .*task.*Exited|Traceback|  )|exit status|exit code")


def no_answer(seconds: float) -> str:
    return f"no answer in {seconds:g} s"


class Peer:
    """A node that the doctor asks."""

    def __init__(self, loop: Loop, name: str, trouble: str | None = None) -> None:
        """``trouble``: why it cannot be asked."""
        self.name = name
        self.check = ""  # what people may type to try to reach it
        self.trouble = trouble  # why it answers no more, for people
        self.answer: NodeAnswer | None = None  # to the last question
        self.sent = self.took = 0.0  # when that was asked by the wall clock, and how long the answer took
        self._loop = loop
        self._connection: Connection[Any] | None = None
        self._present = False
        self._question: Question | None = None
        self._kind: type[object] = Present
        self._late = loop.after(START_DEADLINE, lambda: self._lose(no_answer(START_DEADLINE)))

    @property
    def waits(self) -> bool:
        """Whether an answer may still come."""
        return self._question is not None and self.trouble is None

    def connect(self, connection: Connection[Any]) -> None:
        """Hear the process at the other end, which begins with Present."""
        self._connection = connection
        connection.hear, connection.lost = self._hear, self._lost
        connection.expect((Present,))

    def ask(self, question: Question, kind: type[object]) -> None:
        """Ask for an answer of this kind, as soon as the process is there."""
        self.answer, self._question, self._kind = None, question, kind
        if self._present:
            self._send()

    def leave(self, code: int) -> None:
        """Say that this was all."""
        if self._connection:
            self._connection.send(Leave(code))
            self._connection.finish()

    def close(self) -> None:
        """Drop the connection, at which the process ends."""
        self._late.cancel()
        if self._connection:
            self._connection.close()

    def wait(self, until: float) -> None:
        """Wait for the end of what was started, and kill it if it has not ended at ``until``, by time.monotonic()."""

    def _send(self) -> None:
        assert self._connection
        self._connection.expect((self._kind,))
        self.sent, self._began = time.time(), time.monotonic()
        self._connection.send(self._question)

    def _hear(self, message: NodeAnswer) -> None:
        assert self._connection
        self._connection.expect(())  # it speaks when it is asked
        if not isinstance(message, Present):
            self.answer, self._question = message, None
            self.took = time.monotonic() - self._began
            return
        self._present = True
        self._late.cancel()
        if message.version != __version__:
            self._lose(f"ddplaunch {shown(message.version, 20)} there, {__version__} here")
        elif self._question:
            self._send()

    def _lost(self, why: str) -> None:
        self._lose(self._why_ended() if "its connection" in why else UNREADABLE)

    def _lose(self, why: str) -> None:
        self.trouble = self.trouble or why

    def _why_ended(self) -> str:
        return "its connection closed"


class CommandPeer(Peer):
    """A node that a command reaches, or is: the process speaks through the stdin and stdout of that."""

    def __init__(self, loop: Loop, name: str, words: Sequence[str], check: str = "") -> None:
        super().__init__(loop, name)
        self.check = check
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, theirs = socket.socketpair()
        with theirs:  # a session of its own: at Ctrl-C we close its stdin, and it ends
            end = theirs.fileno()
            self._process = subprocess.Popen(
                words, stdin=end, stdout=end, stderr=self._complaints, start_new_session=True
            )
        self._seen = b""
        loop.watch(self._socket.fileno(), self._find_mark)

    def _find_mark(self) -> None:
        """Pass over what a login shell prints, and no byte of the first frame."""
        data = self._socket.recv(1 << 16, socket.MSG_PEEK)
        seen = self._seen + data
        at = seen.find(MARK)
        self._socket.recv(len(data) if at < 0 else at + len(MARK) - len(self._seen))
        self._seen = seen[-len(MARK) :]
        if at >= 0:
            self.connect(Connection(self._loop, self._socket, (), self._hear, self._lost))
        elif not data:
            self._loop.forget(self._socket.fileno())
            self._lose(self._why_ended())

    def _why_ended(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").splitlines()
        telling = [line for line in said if line.strip() and not _HOLLOW.search(line)] or said
        last = shown(telling[-1], LONGEST_COMPLAINT) if telling else f"it ended without a message (exit code {code})"
        return why_ended(said, last, code)

    def close(self) -> None:
        super().close()
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())
            self._socket.close()

    def wait(self, until: float) -> None:
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()
