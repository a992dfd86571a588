"""The launcher's end of the zygote socket: framed JSON messages with descriptors, never blocking.

The zygote may be importing, stopped or gone.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct, field

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.rank.zygote_channel import HEADER, MAX_DESCRIPTORS, encode_message
from ddplaunch.core.rank.zygote_messages import FromZygote, ToZygote

_TRANSIENT_ERRORS = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""What is short may become available; the kernel limits the descriptors in flight per user, not per process."""

_RETRY_INTERVAL_S, _RETRY_TIMEOUT_S = 0.1, 5.0  # after such an error


class _OutgoingMessage(Struct):
    data: memoryview
    fds: list[int]
    failed: Callable[[OSError], None]
    rank: int | None  # whose process it requests
    tries: int = 0


class _IncomingMessage(Struct):
    data: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    size: int | None = None


class ZygoteSocketListener(Protocol):
    """Handles what arrives from the zygote."""

    def on_zygote_message(self, message: FromZygote, fds: list[int]) -> None: ...  # with its descriptors
    def on_zygote_closed(self) -> None: ...  # once, after end of file
    def on_zygote_queue_sent(self) -> None: ...  # messages had to wait, and now all are sent


class ZygoteSocket:
    """Sends and receives messages with descriptors; unsent messages are queued."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        listener: ZygoteSocketListener,
    ) -> None:
        self._loop, self._socket, self._listener = loop, sock, listener
        self._queue: deque[_OutgoingMessage] = deque()
        self._incoming = _IncomingMessage()
        sock.setblocking(False)
        loop.watch_fd(sock.fileno(), self._on_readable)

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def is_idle(self) -> bool:
        """Whether no message waits to be sent."""
        return not self._queue

    def send(
        self,
        message: ToZygote,
        fds: Sequence[int] = (),
        on_failed: Callable[[OSError], None] = lambda error: None,
        rank: int | None = None,
    ) -> None:
        """Queue a message; takes over ``fds`` and closes them. ``rank``: whose process it requests, if it does.

        ``on_failed`` gets the error if the kernel refuses the message; it is not called when the peer has closed.
        """
        self._queue.append(_OutgoingMessage(memoryview(encode_message(message)), list(fds), on_failed, rank))
        if len(self._queue) == 1:
            self._send_pending()

    def withdraw_unsent(self) -> list[int]:
        """Remove unsent requests for processes; return their ranks."""
        unsent = [message for message in self._queue if message.rank is not None and message.fds]
        for message in unsent:
            _close(message.fds)
            self._queue.remove(message)
        return [message.rank for message in unsent if message.rank is not None]

    def close(self) -> None:
        for fds in (self._incoming.fds, *(message.fds for message in self._queue)):
            _close(fds)
        self._queue.clear()
        self._loop.unwatch_fd(self._socket.fileno())
        self._socket.close()

    def _on_writable(self) -> None:
        self._send_pending()
        if self.is_idle and not self.is_closed:
            self._listener.on_zygote_queue_sent()

    def _send_pending(self) -> None:
        while self._queue and not self.is_closed:
            message = self._queue[0]
            try:
                if message.fds:
                    sent = socket.send_fds(self._socket, [message.data], message.fds)
                else:
                    sent = self._socket.send(message.data)
            except BlockingIOError:
                return self._loop.watch_fd(self._socket.fileno(), self._on_writable, write=True)
            except OSError as error:
                self._loop.unwatch_fd(self._socket.fileno(), write=True)
                message.tries += 1
                if error.errno in _TRANSIENT_ERRORS and message.tries * _RETRY_INTERVAL_S < _RETRY_TIMEOUT_S:
                    self._loop.call_later(_RETRY_INTERVAL_S, self._on_writable)
                    return
                _close(self._queue.popleft().fds)
                if error.errno in _TRANSIENT_ERRORS:
                    message.failed(error)
                continue  # the peer has closed: end of file is handled by ``_on_readable``
            _close(message.fds)
            message.data = message.data[sent:]
            if not message.data:
                self._queue.popleft()
        if not self.is_closed:
            self._loop.unwatch_fd(self._socket.fileno(), write=True)

    def _on_readable(self) -> None:
        """Read a part of one message: first the header alone, which its descriptors arrive with."""
        incoming = self._incoming
        try:
            if incoming.size is None:
                data, fds, _, _ = socket.recv_fds(self._socket, HEADER.size - len(incoming.data), MAX_DESCRIPTORS)
                incoming.fds += fds
            else:
                data = self._socket.recv(incoming.size - len(incoming.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch_fd(self._socket.fileno())
            self._listener.on_zygote_closed()
            return
        incoming.data += data
        if incoming.size is None and len(incoming.data) == HEADER.size:
            incoming.size = HEADER.unpack(incoming.data)[0]
            incoming.data.clear()
        elif len(incoming.data) == incoming.size:
            self._incoming = _IncomingMessage()
            self._listener.on_zygote_message(json.loads(incoming.data), incoming.fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
