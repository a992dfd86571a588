"""The launcher's end of the rank channel, a socket on which a rank reports its state.

``core/rank/inspection_endpoint.py`` is the other end; the files ``rank/`` of the features describe their messages.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.event_loop import EventLoop

_MAX_REPLY_BYTES = 16 << 20  # 2,000 collectives take 1 MB
_CHUNK = 1 << 18


def _ignore_reply(reply: bytes) -> None:
    """Ignore a reply: no request waits for one."""


class RankChannel:
    """The launcher's end of one rank's channel, open from before the rank starts until it has ended."""

    def __init__(
        self,
        loop: EventLoop,
        on_failed: Callable[[str], None],
        on_mismatch: Callable[[str, str, str], object] = lambda *_: None,
        has_only_printed: Callable[[int], bool] = lambda written: False,
    ) -> None:
        """Open the channel.

        Args:
            loop: reads the channel.
            on_failed: gets the exception, or the ``sys.exit``, that has ended the rank's program.
            on_mismatch: gets outcome, module and difference of an import that does not fit: ``events.ImportMismatch``.
            has_only_printed: called if a rank wants to start over, with the number of bytes that it has written;
                returns whether all of them came through the rank's pipes.

        Raises OSError if too many files are open.
        """
        self._loop = loop
        our_socket, rank_socket = socket.socketpair()
        self._socket = our_socket
        self._buffer = bytearray()
        self._serial = 0
        self.rank_fd = rank_socket.detach()  # the rank's end, to be sent to the zygote
        self.stack_signals = (0, 0)  # signals on which it dumps its stacks: from Python, and at once; 0 for none
        self.stacks_fd = 0  # the descriptor that it writes stack dumps to
        self.signals: dict[str, int] = {}  # by purpose: other signals on which features act in it; 0 for none
        self.used_signals: set[str] = set()  # the purposes of those that it handles; others it will on request
        self.is_ready = False  # whether it has sent these
        self.has_thread = False  # whether its endpoint thread runs: it has called init_process_group
        self.bytes_received = 0  # sent by the rank so far
        self._request = b""  # the last one with a reply
        self._on_reply: Callable[[bytes], None] = _ignore_reply
        self._on_failed, self._on_mismatch, self._has_only_printed = on_failed, on_mismatch, has_only_printed
        our_socket.setblocking(False)
        loop.watch_fd(our_socket.fileno(), self.read_pending)

    @property
    def reserved_signals(self) -> tuple[int, ...]:
        """The signals that the launcher uses in this rank."""
        return (*self.stack_signals, *(self.signals[purpose] for purpose in self.used_signals))

    def close(self) -> None:
        self._end()
        self._socket.close()

    def _end(self) -> None:
        """Stop reading this channel, and drop the handler of the reply."""
        self.has_thread = False
        self.clear_reply_handler()
        if self._socket.fileno() >= 0:
            self._loop.unwatch_fd(self._socket.fileno())

    def write_line(self, line: bytes) -> None:
        """Send a request line."""
        try:
            self._socket.send(line + b"\n")
        except OSError:  # it has exited, or its buffer is full
            self.has_thread = False

    def request(self, letter: bytes, on_reply: Callable[[bytes], None]) -> None:
        """Send a request to the feature that handles this letter; ``on_reply`` gets what it replies.

        Replies to earlier requests are ignored from now on.
        """
        self._serial += 1
        self._request, self._on_reply = b"%s%d" % (letter, self._serial), on_reply
        self.write_line(self._request)

    def clear_reply_handler(self) -> None:
        self._on_reply = _ignore_reply

    def read_pending(self) -> None:
        """Handle all messages that have arrived."""
        try:
            while data := self._socket.recv(_CHUNK):
                self._buffer += data
                self.bytes_received += len(data)
                *lines, rest = self._buffer.split(b"\n")
                self._buffer = bytearray(rest)
                for line in lines:
                    self._handle_line(bytes(line))
                if len(self._buffer) > _MAX_REPLY_BYTES:
                    self._buffer.clear()
                    break
        except BlockingIOError:
            return
        except OSError:
            pass
        self._end()

    def _handle_line(self, line: bytes) -> None:
        """Handle a line of the rank; a malformed one, written by the program itself, is ignored."""
        word, *rest = line.split(b" ", 1)
        try:
            if word == b"h":
                first, second, self.stacks_fd = map(int, rest[0].split())
                self.stack_signals = first, second
                self.is_ready = True
            elif word in (b"g", b"o"):
                purpose, number = rest[0].decode().split()
                self.signals[purpose] = int(number)
                if word == b"g":
                    self.used_signals.add(purpose)
            elif word in (b"t", b"l"):
                self.has_thread = word == b"t"
            elif word == b"f":
                self._on_failed(sanitize_line(rest[0].decode(errors="replace"), 100))
            elif word == b"p":
                self.write_line(b"p%d" % self._has_only_printed(int(rest[0])))
            elif word == b"r":
                outcome, module, differs = rest[0].decode(errors="replace").split(" ", 2)
                self._on_mismatch(outcome, sanitize_line(module, 100), sanitize_line(differs, 300))
            elif word == b"x":
                left = int(rest[0])
                self.stack_signals = self.stack_signals[0] if left else 0, self.stack_signals[1] if left > 1 else 0
            elif word == self._request:  # else it is late
                self._on_reply(rest[0])
        except (ValueError, IndexError):
            pass
