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
from ddplaunch.commands.doctor.messages import START_MARK, Exit, NodeAnswer, Question, Ready
from ddplaunch.errors import sanitize_line
from ddplaunch.loop import EventLoop
from ddplaunch.plan.command import START_TIMEOUT_S
from ddplaunch.ssh.client import MAX_QUOTED_CHARS, explain_exit
from ddplaunch.wire.connection import Connection

UNREADABLE_REPLY_ERROR = "ddplaunch cannot read the answer of this host"

EXIT_TIMEOUT_S = 2.0  # seconds for a command to end once its stdin is closed
_UNINFORMATIVE = re.compile(
    r"^(Warning: Permanently added|srun: error: .*task.*Exited|Traceback|  )|exit status|exit code"
)


def timeout_text(seconds: float) -> str:
    return f"no answer in {seconds:g} s"


class DoctorPeer:
    """A node that the doctor asks."""

    def __init__(self, loop: EventLoop, name: str, trouble: str | None = None) -> None:
        """``error``: why it cannot be asked."""
        self.name = name
        self.check_command = ""  # what people may type to try to reach it
        self.error = trouble  # why it answers no more, for people
        self.answer: NodeAnswer | None = None  # to the last question
        self.sent = self.took = 0.0  # when that was asked by the wall clock, and how long the answer took
        self._loop = loop
        self._connection: Connection[Any] | None = None
        self._present = False
        self._question: Question | None = None
        self._kind: type[object] = Ready
        self._timeout_timer = loop.call_later(START_TIMEOUT_S, lambda: self._fail(timeout_text(START_TIMEOUT_S)))

    @property
    def is_waiting(self) -> bool:
        """Whether an answer may still come."""
        return self._question is not None and self.error is None

    def connect(self, connection: Connection[Any]) -> None:
        """Hear the process at the other end, which begins with Present."""
        self._connection = connection
        connection.hear, connection.lost = self._on_message, self._on_disconnect
        connection.set_accepted_types((Ready,))

    def send_request(self, question: Question, kind: type[object]) -> None:
        """Ask for an answer of this kind, as soon as the process is there."""
        self.answer, self._question, self._kind = None, question, kind
        if self._present:
            self._send()

    def send_exit(self, code: int) -> None:
        """Say that this was all."""
        if self._connection:
            self._connection.send(Exit(code))
            self._connection.shutdown_write()

    def close(self) -> None:
        """Drop the connection, at which the process ends."""
        self._timeout_timer.cancel()
        if self._connection:
            self._connection.close()

    def wait_for_exit(self, until: float) -> None:
        """Wait for the end of what was started, and kill it if it has not ended at ``until``, by time.monotonic()."""

    def _send(self) -> None:
        assert self._connection
        self._connection.set_accepted_types((self._kind,))
        self.sent, self._began = time.time(), time.monotonic()
        self._connection.send(self._question)

    def _on_message(self, message: NodeAnswer) -> None:
        assert self._connection
        self._connection.set_accepted_types(())  # it speaks when it is asked
        if not isinstance(message, Ready):
            self.answer, self._question = message, None
            self.took = time.monotonic() - self._began
            return
        self._present = True
        self._timeout_timer.cancel()
        if message.version != __version__:
            self._fail(f"ddplaunch {sanitize_line(message.version, 20)} there, {__version__} here")
        elif self._question:
            self._send()

    def _on_disconnect(self, why: str) -> None:
        self._fail(self._why_ended() if "its connection" in why else UNREADABLE_REPLY_ERROR)

    def _fail(self, why: str) -> None:
        self.error = self.error or why

    def _why_ended(self) -> str:
        return "its connection closed"


class CommandPeer(DoctorPeer):
    """A node that a command reaches, or is: the process speaks through the stdin and stdout of that."""

    def __init__(self, loop: EventLoop, name: str, words: Sequence[str], check: str = "") -> None:
        super().__init__(loop, name)
        self.check_command = check
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, theirs = socket.socketpair()
        with theirs:  # a session of its own: at Ctrl-C we close its stdin, and it ends
            end = theirs.fileno()
            self._process = subprocess.Popen(
                words, stdin=end, stdout=end, stderr=self._complaints, start_new_session=True
            )
        self._seen = b""
        loop.watch_fd(self._socket.fileno(), self._find_mark)

    def _find_mark(self) -> None:
        """Pass over what a login shell prints, and no byte of the first frame."""
        data = self._socket.recv(1 << 16, socket.MSG_PEEK)
        seen = self._seen + data
        at = seen.find(START_MARK)
        self._socket.recv(len(data) if at < 0 else at + len(START_MARK) - len(self._seen))
        self._seen = seen[-len(START_MARK) :]
        if at >= 0:
            self.connect(Connection(self._loop, self._socket, (), self._on_message, self._on_disconnect))
        elif not data:
            self._loop.unwatch_fd(self._socket.fileno())
            self._fail(self._why_ended())

    def _why_ended(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").splitlines()
        telling = [line for line in said if line.strip() and not _UNINFORMATIVE.search(line)] or said
        last = (
            sanitize_line(telling[-1], MAX_QUOTED_CHARS)
            if telling
            else f"it ended without a message (exit code {code})"
        )
        return explain_exit(said, last, code)

    def close(self) -> None:
        super().close()
        if self._socket.fileno() >= 0:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()

    def wait_for_exit(self, until: float) -> None:
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()
