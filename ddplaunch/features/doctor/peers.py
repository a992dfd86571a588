"""Connections from the doctor to its process on each node, which answers one request at a time."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from typing import IO, Any

from ddplaunch import __version__
from ddplaunch.base.connection import Connection
from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import TaggedMessage
from ddplaunch.cli.host_connector import NodeCommand
from ddplaunch.features.doctor.messages import START_MARK, Exit, Question, Ready
from ddplaunch.system.plan.launch_command import MAX_QUOTED_CHARS, START_TIMEOUT_S, explain_failed_start

UNREADABLE_REPLY_ERROR = "ddplaunch cannot read the reply of this host"

EXIT_TIMEOUT_S = 2.0  # for a command to exit once its stdin is closed
_UNINFORMATIVE = re.compile(
    r"^(Warning: Permanently added|srun: error: .*task.*Exited|Traceback|  )|exit status|exit code"
)


def timeout_text(seconds: float) -> str:
    return f"no answer within {seconds:g} s"


class DoctorPeer:
    """One node, and the connection to the doctor's process there."""

    def __init__(self, loop: EventLoop, name: str, error: str | None = None) -> None:
        """``error``: why the node cannot be reached."""
        self.name = name
        self.check_command = ""  # a command with which users can test the route
        self.error = error  # why it does not answer any more, for the user
        self.answer: TaggedMessage | None = None  # the reply to the last request
        self.sent = self.took = 0.0  # wall-clock time of the last request, and how long the reply took
        self._began = 0.0  # the same moment by time.monotonic()
        self._loop = loop
        self._connection: Connection[Any] | None = None
        self._ready = False
        self._question: Question | None = None
        self._kind: type[object] = Ready
        self._timeout_timer = loop.call_later(START_TIMEOUT_S, lambda: self._fail(timeout_text(START_TIMEOUT_S)))

    @property
    def is_waiting(self) -> bool:
        """Whether a reply is outstanding."""
        return self._question is not None and self.error is None

    def connect(self, connection: Connection[Any]) -> None:
        """Use ``connection`` to the doctor's process on the node; its first message is Ready."""
        self._connection = connection
        connection.on_message, connection.on_lost = self._on_message, self._on_disconnect
        connection.set_accepted_types((Ready,))

    def send_request(self, question: Question, kind: type[object]) -> None:
        """Send a request that expects this type of reply, once the process is ready."""
        self.answer, self._question, self._kind = None, question, kind
        if self._ready:
            self._send()

    def send_exit(self, code: int) -> None:
        """Make the process exit with this code."""
        if self._connection:
            self._connection.send(Exit(code))
            self._connection.shutdown_write()

    def close(self) -> None:
        """Close the connection, at which the process exits."""
        self._timeout_timer.cancel()
        if self._connection:
            self._connection.close()

    def wait_for_exit(self, deadline: float) -> None:
        """Wait for the exit of the command that was started; kill it at ``deadline``, by time.monotonic()."""

    def _send(self) -> None:
        assert self._connection
        self._connection.set_accepted_types((self._kind,))
        self.sent, self._began = time.time(), time.monotonic()
        self._connection.send(self._question)

    def _on_message(self, message: TaggedMessage) -> None:
        assert self._connection
        self._connection.set_accepted_types(())  # it may only send replies
        if not isinstance(message, Ready):
            self.answer, self._question = message, None
            self.took = time.monotonic() - self._began
            return
        self._ready = True
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


def _open_memory_file() -> IO[bytes]:
    """Open a file in memory, as disks may be full; on a disk if Python has no memfd_create (conda's)."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


class CommandPeer(DoctorPeer):
    """A node whose process is started by a command, such as ssh or srun, and connected by its stdin and stdout."""

    def __init__(self, loop: EventLoop, command: NodeCommand) -> None:
        super().__init__(loop, command.host)
        self.check_command = command.test_command
        self._stderr = _open_memory_file()
        self._socket, child_socket = socket.socketpair()
        with child_socket:  # a session of its own: at Ctrl-C the doctor closes its stdin, and it exits
            end = child_socket.fileno()
            self._process = subprocess.Popen(
                command.words, stdin=end, stdout=end, stderr=self._stderr, start_new_session=True
            )
        self._tail = b""
        loop.watch_fd(self._socket.fileno(), self._find_start_mark)

    def _find_start_mark(self) -> None:
        """Skip the output of a login shell up to START_MARK, and read no byte of the first frame."""
        data = self._socket.recv(1 << 16, socket.MSG_PEEK)
        received = self._tail + data
        at = received.find(START_MARK)
        self._socket.recv(len(data) if at < 0 else at + len(START_MARK) - len(self._tail))
        self._tail = received[-len(START_MARK) :]
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
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        informative = [line for line in lines if line.strip() and not _UNINFORMATIVE.search(line)] or lines
        last = f"it exited without a message (exit code {code})"
        if informative:
            last = sanitize_line(informative[-1], MAX_QUOTED_CHARS)
        return explain_failed_start(lines, last, code)

    def close(self) -> None:
        super().close()
        if self._socket.fileno() >= 0:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()

    def wait_for_exit(self, deadline: float) -> None:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
