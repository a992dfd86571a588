"""The ways to the process on a node: through the pipes of a command that reaches it, or over a connection."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ddplaunch.commands.doctor.lines import LONGEST, Lines
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import shown

_SEND_PATIENCE = 10.0  # seconds for a node to take a question
_LONGEST_QUOTE = 300  # characters of what others print that we quote
_HOLLOW = re.compile(r"^(Warning: Permanently added|srun: error: .*task.*Exited|Traceback|  )|exit status|exit code")


class Channel(Protocol):
    """A way to a node's process: lines there, lines back."""

    def send(self, line: bytes) -> None:
        """Send a line; of a process that has ended, the next line is b""."""

    def line(self, until: float | None) -> bytes | None:
        """The next line that comes back: see ``Lines.next``."""

    def why_ended(self) -> str:
        """Why no more lines come, for people."""

    def close(self) -> None:
        """End what was started."""


class Process:
    """A command that is the process, or reaches it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: at Ctrl-C we close its stdin, and it ends.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
            start_new_session=True,
        )
        self._lines = Lines(self._process.stdout)

    def send(self, line: bytes) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.write(line)

    def line(self, until: float | None) -> bytes | None:
        return self._lines.next(until)

    def why_ended(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").splitlines()
        if any(re.search("No module named '?ddplaunch", line) for line in said):
            return "ddplaunch is not installed for this Python there (--remote-python names another)"
        telling = [line for line in said if line.strip() and not _HOLLOW.search(line)] or said
        last = shown(telling[-1], _LONGEST_QUOTE) if telling else f"it ended without a message (exit code {code})"
        return f"{last} (--remote-python names another Python)" if code in (126, 127) else last

    def close(self) -> None:
        """Its stdin closes, and with that all that it has started ends; what reaches it is killed."""
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


class Connection:
    """A connection between node 0 and a node that was started by hand; both ends have one."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock`` becomes ours."""
        sock.settimeout(_SEND_PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._lines = Lines(sock)

    def send(self, line: bytes) -> None:
        with suppress(OSError):
            self._socket.sendall(line)

    def line(self, until: float | None, longest: int = LONGEST) -> bytes | None:
        return self._lines.next(until, longest)

    def why_ended(self) -> str:
        return "its connection closed"

    def close(self) -> None:
        """Nothing yet: the node waits for the exit code of node 0."""

    def finish(self) -> None:
        """Say that this was all; the other side may still say something."""
        self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Say no more, and hear no more."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Absent:
    """No way at all."""

    why: str

    def send(self, line: bytes) -> None:
        pass

    def line(self, until: float | None) -> bytes | None:
        return b""

    def why_ended(self) -> str:
        return self.why

    def close(self) -> None:
        pass
