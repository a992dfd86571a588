"""A connection to one peer in the loop: messages come in and go out, and what the peer does not take at once waits."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

from ddplaunch.loop import EventLoop
from ddplaunch.wire.frames import LENGTH, ProtocolError
from ddplaunch.wire.typed import decode, encode

MAX_UNAUTHENTICATED_FRAME = (
    64 << 10
)  # bytes of a frame from an unknown peer; "GET " read as a length is 1.2 thousand million
MAX_FRAME_BYTES = 8 << 20  # bytes of a frame from a node of the job
MAX_SEND_BUFFER = 64 << 20  # bytes that a node may leave unread before it counts as lost

_CHUNK = 1 << 18
_MAX_IOVECS = 64  # frames that one call of the kernel takes

M = TypeVar("M")  # the messages that a connection may carry, or one of them


class Connection(Generic[M]):
    """One peer. ``on_message`` gets each message, ``on_lost`` once why there will be no more.

    Where ``on_message`` raises Garbled, before it has acted, the peer counts as lost.
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
        """``sock`` becomes ours; ``max_bytes`` of a frame that comes, ``max_send_buffer`` of what the peer left unread."""
        sock.setblocking(False)
        self.here = self.there = ""
        """Our address on this connection and the peer's, as literals; a socket that was reset has none any more."""
        if sock.family != socket.AF_UNIX:
            with suppress(OSError):  # reset already, as the first look at it will show
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.here, self.there = format_address(sock.getsockname()), format_address(sock.getpeername())
        self._loop = loop
        self._socket = sock
        self._accepted = tuple(accepted_types)
        self._max_bytes = max_bytes
        self._max_waiting = max_send_buffer
        self.hear = on_message
        self.lost = on_lost
        self._coming = bytearray()
        self._going: deque[bytes] = deque()  # frames, which go to many peers without a copy for each
        self._begun = 0  # bytes of the first of them that the peer has taken
        self._waiting = 0  # bytes of all of them that it has not
        self._ending = False
        loop.watch_fd(sock.fileno(), self._on_readable)

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._waiting if self.is_open else 0

    def set_accepted_types(self, accepted_types: Iterable[type[M]], max_bytes: int = MAX_FRAME_BYTES) -> None:
        """From now on accept other messages."""
        self._accepted, self._max_bytes = tuple(accepted_types), max_bytes

    def send(self, message: object) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what ``encode`` made; what the peer does not take at once waits."""
        if not self.is_open or self._ending:
            return
        self._going.append(frame)
        self._waiting += len(frame)
        if self._waiting > self._max_waiting:
            self._clear_send_buffer()
            self._ending = True
            return self._loop.call_soon(lambda: self._fail("it reads nothing"))  # not from within the owner's own call
        self._on_writable()

    def shutdown_write(self) -> None:
        """Send what is waiting, then say that this was all; the peer's own end is still awaited."""
        self._ending = True
        if self.is_open and not self._going:
            self._close_socket()

    def close_gracefully(self, timeout_s: float) -> None:
        """Hear nothing more; close when the peer has read what is waiting, or after ``timeout_s``."""
        self._drop_callbacks()
        self.shutdown_write()
        self._loop.call_later(timeout_s, self.close)

    def close(self) -> None:
        """Drop the connection; ``on_lost`` is not called."""
        if self.is_open:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._drop_callbacks()

    def _drop_callbacks(self) -> None:
        """Call nobody any more; who is called mostly holds us, and only the garbage collector would see that."""
        self.hear, self.lost = lambda message: None, lambda why: None

    def _fail(self, why: str) -> None:
        if self.is_open:
            lost = self.lost
            self.close()
            lost(why)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            return self._fail(f"its connection broke: {error.strerror}")
        if not data:
            return self._fail("its connection closed")
        self._coming += data
        while len(self._coming) >= LENGTH.size and self.is_open:
            (length,) = LENGTH.unpack_from(self._coming)
            if length > self._max_bytes:
                return self._fail("it speaks something else")
            end = LENGTH.size + length
            if len(self._coming) < end:
                return
            body = bytes(self._coming[LENGTH.size : end])
            del self._coming[:end]
            try:
                self.hear(decode(body, self._accepted))
            except ProtocolError as error:
                return self._fail(f"it sent {error}")

    def _on_writable(self) -> None:
        try:
            while self._going:
                self._on_sent(self._socket.sendmsg(self._next_buffers()))
        except BlockingIOError:
            pass
        except OSError:  # what the peer still said is read first; then its end, or the error, is seen there
            self._clear_send_buffer()
            self._loop.unwatch_fd(self._socket.fileno(), write=True)
            return
        if self._going:
            self._loop.watch_fd(self._socket.fileno(), self._on_writable, write=True)
        else:
            self._loop.unwatch_fd(self._socket.fileno(), write=True)
            if self._ending:
                self._close_socket()

    def _next_buffers(self) -> list[bytes | memoryview]:
        """The next of what waits, without a copy."""
        first, *others = islice(self._going, _MAX_IOVECS)
        return [memoryview(first)[self._begun :], *others]

    def _on_sent(self, sent: int) -> None:
        self._waiting -= sent
        self._begun += sent
        while self._going and self._begun >= len(self._going[0]):
            self._begun -= len(self._going.popleft())

    def _clear_send_buffer(self) -> None:
        self._going.clear()
        self._begun = self._waiting = 0

    def _close_socket(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def format_address(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """A socket's address as a literal: one that IPv6 maps is IPv4's own, a link-local one has its interface."""
    address = str(name[0]).removeprefix("::ffff:") if "." in str(name[0]) else str(name[0])
    if len(name) == 4 and name[3] and "%" not in address:
        address += f"%{socket.if_indextoname(name[3])}"
    return address
