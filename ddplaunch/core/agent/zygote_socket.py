"""The launcher's end of the zygote socket: framed JSON messages with descriptors, never blocking.

The zygote may be importing, stopped or gone.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct, field

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.rank.zygote_channel import HEADER, MAX_DESCRIPTORS, encode_message
from ddplaunch.core.rank.zygote_messages import FromZygote, ToZygote

_TRANSIENT_ERRORS = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""Memory or descriptors may become available; the kernel limits the descriptors in flight per user."""

_RETRY_INTERVAL_S, _RETRY_TIMEOUT_S = 0.1, 5.0  # after such an error


BuildMessage = Callable[[list[int]], ToZygote]
"""Builds a message, and adds its descriptors, which are closed in any case. OSError: too many files are open."""


class _OutgoingMessage(Struct):
    build: BuildMessage
    on_failed: Callable[[OSError], object] | None
    rank: int | None  # whose process it requests
    data: memoryview | None = None  # the part that is not sent yet; None until the message is built
    fds: list[int] = field(default_factory=list)
    tries: int = 0


class _IncomingMessage(Struct):
    data: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    size: int | None = None


class ZygoteMessageHandler(Protocol):
    """Handles the messages of the zygote, and the end of its socket."""

    def on_zygote_message(self, message: FromZygote, fds: list[int]) -> None: ...  # with its descriptors
    def on_zygote_closed(self) -> None: ...  # once, after end of file


class ZygoteSocket:
    """Sends and receives messages with descriptors; unsent messages are queued."""

    def __init__(self, loop: EventLoop, sock: socket.socket, listener: ZygoteMessageHandler) -> None:
        self._loop, self._socket, self._listener = loop, sock, listener
        self._queue: deque[_OutgoingMessage] = deque()
        self._is_dropping = False  # a message has failed, and its handler will be called
        self._incoming = _IncomingMessage()
        sock.setblocking(False)
        loop.watch_fd(sock.fileno(), self._on_readable)

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def send(self, message: ToZygote) -> None:
        """Queue a message without descriptors."""
        self.send_built(lambda fds: message)

    def send_built(
        self, build: BuildMessage, on_failed: Callable[[OSError], object] | None = None, rank: int | None = None
    ) -> None:
        """Queue a message, built after all earlier ones are sent. ``rank``: the rank whose process it requests, if any.

        ``on_failed`` gets the error if too many files are open, or in flight to other processes; later messages wait
        until ``on_failed`` has returned. If it is None, the message is sent without descriptors.
        """
        self._queue.append(_OutgoingMessage(build, on_failed, rank))
        if len(self._queue) == 1:
            self._send_pending()

    def withdraw_unsent_spawns(self) -> list[int]:
        """Remove unsent requests for processes; return their ranks."""
        unsent = [each for each in self._queue if each.rank is not None and (each.data is None or each.fds)]
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

    def _send_pending(self) -> None:
        while self._queue and not (self.is_closed or self._is_dropping):
            message = self._queue[0]
            try:
                if message.data is None:
                    message.data = memoryview(encode_message(message.build(message.fds)))
                if message.fds:
                    sent = socket.send_fds(self._socket, [message.data], message.fds)
                else:
                    sent = self._socket.send(message.data)
            except BlockingIOError:
                return self._loop.watch_fd(self._socket.fileno(), self._send_pending, write=True)
            except OSError as error:
                self._loop.unwatch_fd(self._socket.fileno(), write=True)
                message.tries += 1
                is_transient = message.data is not None and error.errno in _TRANSIENT_ERRORS
                may_fail = message.fds or message.on_failed  # else there is nothing to do but to try again
                if is_transient and not (may_fail and message.tries * _RETRY_INTERVAL_S >= _RETRY_TIMEOUT_S):
                    self._loop.call_later(_RETRY_INTERVAL_S, self._send_pending)
                    return
                _close(message.fds)
                if message.on_failed and (is_transient or message.data is None):
                    return self._drop_first_message(message.on_failed, error)
                if not is_transient:
                    self._queue.popleft()  # the peer has closed: end of file is handled by ``_on_readable``
                continue
            _close(message.fds)
            message.data = message.data[sent:]
            if not message.data:
                self._queue.popleft()
        if not self.is_closed:
            self._loop.unwatch_fd(self._socket.fileno(), write=True)

    def _drop_first_message(self, on_failed: Callable[[OSError], object], error: OSError) -> None:
        """Drop the first message, which cannot be sent; ``on_failed`` may withdraw others that would fail too."""

        def report_error() -> None:
            self._is_dropping = False
            if not self.is_closed:
                on_failed(error)
                self._send_pending()

        self._queue.popleft()
        self._is_dropping = True
        self._loop.call_soon(report_error)

    def _on_readable(self) -> None:
        """Read a part of one message: first only the header, with which the message's descriptors arrive."""
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
