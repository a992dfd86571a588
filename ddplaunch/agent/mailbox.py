"""The supervisor's end of the socket to a zygote, which may be importing, stopped or gone: nothing here ever waits."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field
from ddplaunch.loop import Callback, EventLoop
from ddplaunch.rank.channel import HEADER, MAX_DESCRIPTORS, encode_message

if TYPE_CHECKING:
    from ddplaunch.rank.messages import FromZygote, ToZygote

_TRANSIENT_ERRORS = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""Somebody may give back what is short; of descriptors on their way the kernel counts all that a user has."""

_RETRY, _PATIENCE = 0.1, 5.0  # seconds between two attempts then, and in all


@dataclass
class _OutgoingMessage:
    data: memoryview
    fds: list[int]
    failed: Callable[[OSError], None]
    tries: int = 0


@dataclass
class _IncomingMessage:
    data: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    size: int | None = None


class ZygoteSocket:
    """Sends and receives messages with descriptors; what the other end does not take at once waits here."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_message: Callable[[FromZygote, list[int]], None],
        on_closed: Callback,
    ) -> None:
        """``on_message`` is called with each message and its descriptors, ``on_closed`` once, when the other end has closed."""
        self._loop, self._socket, self._hear, self._gone = loop, sock, on_message, on_closed
        self._letters: deque[_OutgoingMessage] = deque()
        self._arriving = _IncomingMessage()
        sock.setblocking(False)
        loop.watch_fd(sock.fileno(), self._on_readable)

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def is_idle(self) -> bool:
        return not self._letters

    def send(
        self, message: ToZygote, fds: Sequence[int] = (), on_failed: Callable[[OSError], None] = lambda error: None
    ) -> None:
        """Send a message, in turn; ``fds`` become ours and are closed.

        ``on_failed`` is called with the reason where the kernel does not take it; not where the other end has gone.
        """
        self._letters.append(_OutgoingMessage(memoryview(encode_message(message)), list(fds), on_failed))
        if len(self._letters) == 1:
            self._send_pending()

    def withdraw_unsent(self) -> int:
        """Take back what has descriptors and has not left; return how many messages that were."""
        back = [letter for letter in self._letters if letter.fds]
        for letter in back:
            _close(letter.fds)
            self._letters.remove(letter)
        return len(back)

    def close(self) -> None:
        for fds in (self._arriving.fds, *(letter.fds for letter in self._letters)):
            _close(fds)
        self._letters.clear()
        self._loop.unwatch_fd(self._socket.fileno())
        self._socket.close()

    def _send_pending(self) -> None:
        while self._letters and not self.is_closed:
            letter = self._letters[0]
            try:
                if letter.fds:
                    sent = socket.send_fds(self._socket, [letter.data], letter.fds)
                else:
                    sent = self._socket.send(letter.data)
            except BlockingIOError:
                return self._loop.watch_fd(self._socket.fileno(), self._send_pending, write=True)
            except OSError as error:
                self._loop.unwatch_fd(self._socket.fileno(), write=True)
                letter.tries += 1
                if error.errno in _TRANSIENT_ERRORS and letter.tries * _RETRY < _PATIENCE:
                    self._loop.call_later(_RETRY, self._send_pending)
                    return
                _close(self._letters.popleft().fds)
                if error.errno in _TRANSIENT_ERRORS:
                    letter.failed(error)
                continue  # it has gone: the end of file says so too
            _close(letter.fds)
            letter.data = letter.data[sent:]
            if not letter.data:
                self._letters.popleft()
        if not self.is_closed:
            self._loop.unwatch_fd(self._socket.fileno(), write=True)

    def _on_readable(self) -> None:
        """Take what there is of one message: first the header alone, which its descriptors come with."""
        arriving = self._arriving
        try:
            if arriving.size is None:
                data, fds, _, _ = socket.recv_fds(self._socket, HEADER.size - len(arriving.data), MAX_DESCRIPTORS)
                arriving.fds += fds
            else:
                data = self._socket.recv(arriving.size - len(arriving.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch_fd(self._socket.fileno())
            self._gone()
            return
        arriving.data += data
        if arriving.size is None and len(arriving.data) == HEADER.size:
            arriving.size = HEADER.unpack(arriving.data)[0]
            arriving.data.clear()
        elif len(arriving.data) == arriving.size:
            self._arriving = _IncomingMessage()
            self._hear(json.loads(arriving.data), arriving.fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
