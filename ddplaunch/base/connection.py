"""A message connection to one peer in the event loop, with a send buffer for data that the peer has not read yet."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.frames import LENGTH, ProtocolError
from ddplaunch.base.types import decode, encode

MAX_UNAUTHENTICATED_FRAME = 64 << 10  # bytes of a frame from an unknown peer; "GET " as a length is 1.2e9
MAX_FRAME_BYTES = 8 << 20  # bytes of a frame from a node of the job
MAX_SEND_BUFFER = 64 << 20  # unsent bytes after which the peer counts as lost

_CHUNK = 1 << 18
_MAX_IOVECS = 64  # frames in one sendmsg call

M = TypeVar("M")  # the types of messages of a connection


class Connection(Generic[M]):
    """A connection to one peer. ``on_message`` gets each message; ``on_lost`` is called once, with the reason.

    If ``on_message`` raises ProtocolError (before it changes anything), the peer counts as lost.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        accepted_types: Iterable[type[M]],
        on_message: Callable[[M], None],
        on_lost: Callable[[str], None],
        max_bytes: int = MAX_FRAME_BYTES,
        max_send_buffer: int = MAX_SEND_BUFFER,
    ) -> None:
        """Take ownership of ``sock``. ``max_bytes`` limits a received frame, ``max_send_buffer`` the unsent bytes."""
        sock.setblocking(False)
        self.here = self.there = ""
        """The addresses of this connection's two ends, ours and the peer's, as text; "" for a socket that was reset."""
        if sock.family != socket.AF_UNIX:
            with suppress(OSError):  # the peer has reset it already: the first recv reports that
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.here, self.there = format_address(sock.getsockname()), format_address(sock.getpeername())
        self._loop = loop
        self._socket = sock
        self._accepted = tuple(accepted_types)
        self._max_bytes = max_bytes
        self._max_send_buffer = max_send_buffer
        self.on_message = on_message
        self.on_lost = on_lost
        self._receive_buffer = bytearray()
        self._send_queue: deque[bytes] = deque()  # frames: shared by all peers that get the same one
        self._first_sent = 0  # bytes of the first frame that were sent
        self._unsent = 0  # bytes of all frames that were not sent
        self._closing = False
        loop.watch_fd(sock.fileno(), self._on_readable)

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes in the send buffer, which wait to be sent; 0 once the connection is closed."""
        return self._unsent if self.is_open else 0

    def set_accepted_types(self, accepted_types: Iterable[type[M]], max_bytes: int = MAX_FRAME_BYTES) -> None:
        """Change the message types that are accepted from now on."""
        self._accepted, self._max_bytes = tuple(accepted_types), max_bytes

    def send(self, message: object) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame made by ``encode``, or put it in the send buffer."""
        if not self.is_open or self._closing:
            return
        self._send_queue.append(frame)
        self._unsent += len(frame)
        if self._unsent > self._max_send_buffer:
            self._clear_send_buffer()
            self._closing = True
            # not inside this call: its caller is not prepared for ``on_lost``
            return self._loop.call_soon(lambda: self._fail("it does not read"))
        self._on_writable()

    def shutdown_write(self) -> None:
        """Close the sending side once the send buffer is empty; still receive until the peer closes."""
        self._closing = True
        if self.is_open and not self._send_queue:
            self._shutdown_sending()

    def close_gracefully(self, timeout_s: float) -> None:
        """Stop receiving; close once the send buffer is empty and the peer has closed, or after ``timeout_s``."""
        self._drop_callbacks()
        self.shutdown_write()
        self._loop.call_later(timeout_s, self.close)

    def close(self) -> None:
        """Close at once; ``on_lost`` is not called."""
        if self.is_open:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._drop_callbacks()

    def _drop_callbacks(self) -> None:
        """Replace both callbacks by no-ops: this breaks a reference cycle between the connection and its owner."""
        self.on_message, self.on_lost = lambda message: None, lambda why: None

    def _fail(self, why: str) -> None:
        if self.is_open:
            on_lost = self.on_lost
            self.close()
            on_lost(why)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            return self._fail(f"its connection broke: {error.strerror}")
        if not data:
            return self._fail("its connection closed")
        self._receive_buffer += data
        while len(self._receive_buffer) >= LENGTH.size and self.is_open:
            (length,) = LENGTH.unpack_from(self._receive_buffer)
            if length > self._max_bytes:
                return self._fail("it speaks another protocol")
            end = LENGTH.size + length
            if len(self._receive_buffer) < end:
                return
            body = bytes(self._receive_buffer[LENGTH.size : end])
            del self._receive_buffer[:end]
            try:
                self.on_message(decode(body, self._accepted))
            except ProtocolError as error:
                return self._fail(f"it sent {error}")

    def _on_writable(self) -> None:
        try:
            while self._send_queue:
                self._remove_sent_bytes(self._socket.sendmsg(self._next_buffers()))
        except BlockingIOError:
            pass
        except OSError:  # read what the peer has sent first: then recv reports the end or the error
            self._clear_send_buffer()
            self._loop.unwatch_fd(self._socket.fileno(), write=True)
            return
        if self._send_queue:
            self._loop.watch_fd(self._socket.fileno(), self._on_writable, write=True)
        else:
            self._loop.unwatch_fd(self._socket.fileno(), write=True)
            if self._closing:
                self._shutdown_sending()

    def _next_buffers(self) -> list[bytes | memoryview]:
        """Return views of the next frames in the send buffer for one ``sendmsg`` call, without a copy."""
        first, *others = islice(self._send_queue, _MAX_IOVECS)
        return [memoryview(first)[self._first_sent :], *others]

    def _remove_sent_bytes(self, sent: int) -> None:
        self._unsent -= sent
        self._first_sent += sent
        while self._send_queue and self._first_sent >= len(self._send_queue[0]):
            self._first_sent -= len(self._send_queue.popleft())

    def _clear_send_buffer(self) -> None:
        self._send_queue.clear()
        self._first_sent = self._unsent = 0

    def _shutdown_sending(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def format_address(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Format a socket's address: IPv4-mapped IPv6 as IPv4, link-local IPv6 with its interface."""
    address = str(name[0]).removeprefix("::ffff:") if "." in str(name[0]) else str(name[0])
    if len(name) == 4 and name[3] and "%" not in address:
        address += f"%{socket.if_indextoname(name[3])}"
    return address
