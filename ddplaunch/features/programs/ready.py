"""Checks at intervals whether a program is ready, without ever blocking the launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.features.programs.spec import Condition

FIRST_INTERVAL_S, INTERVAL_S = 0.05, 0.25  # the first one grows by half each time
REPLY_TIMEOUT_S = 5.0  # for a server that accepts, and does not answer
MAX_STATUS_LINE = 4096  # bytes


class ReadyProbe:
    """Checks a condition at intervals, and calls ``on_ready`` once it is met; ``close`` ends this. Uses no proxies."""

    def __init__(
        self, loop: EventLoop, condition: Condition, address: tuple[str, int], on_ready: Callable[[], object]
    ) -> None:
        self._loop, self._condition, self._address, self._on_ready = loop, condition, address, on_ready
        self._interval_s = FIRST_INTERVAL_S
        self._socket: socket.socket | None = None
        self._received = b""
        self._timer: Timer | None = None
        self._set_timer(FIRST_INTERVAL_S, self._check_condition)

    def close(self) -> None:
        self._close_socket()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, seconds: float, callback: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, callback)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _check_condition(self) -> None:
        if self._condition.kind == "file":
            return self._finish(os.path.exists(self._condition.what))
        self._received = b""
        try:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._set_timer(REPLY_TIMEOUT_S, lambda: self._finish(False))
            with suppress(BlockingIOError):
                self._socket.connect(self._address)
        except OSError:
            return self._finish(False)
        self._loop.watch_fd(self._socket.fileno(), self._on_connected, write=True)

    def _on_connected(self) -> None:
        assert self._socket
        self._loop.unwatch_fd(self._socket.fileno())
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return self._finish(False)
        if self._condition.kind == "tcp":
            return self._finish(True)
        host, port = self._address
        request = f"GET {self._condition.what} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        try:
            self._socket.send(request.encode())
        except OSError:
            return self._finish(False)
        self._loop.watch_fd(self._socket.fileno(), self._on_reply)

    def _on_reply(self) -> None:
        """Read the status line of a reply: the program is ready at a status of 200 to 299, not at a redirect."""
        assert self._socket
        try:
            data = self._socket.recv(MAX_STATUS_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        line, end, _ = self._received.partition(b"\r\n")
        if end or not data or len(self._received) >= MAX_STATUS_LINE:
            words = line.split(None, 2)
            is_http = len(words) > 1 and words[0].startswith(b"HTTP/")
            self._finish(is_http and len(words[1]) == 3 and words[1].startswith(b"2"))

    def _finish(self, is_ready: bool) -> None:
        self._close_socket()
        if is_ready:
            self.close()
            self._on_ready()
        else:
            self._set_timer(self._interval_s, self._check_condition)
            self._interval_s = min(INTERVAL_S, 1.5 * self._interval_s)
