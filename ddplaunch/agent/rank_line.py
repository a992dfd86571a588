"""Our end of the socket on which a rank says where it stands (``rank/answers.py`` has the other, and the words)."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import sanitize_line
from ddplaunch.loop import EventLoop

_MAX_REPLY_BYTES = 16 << 20  # bytes: 2,000 collectives are one million
_CHUNK = 1 << 18


@dataclass(frozen=True)
class RankReply:
    """What a rank answered: whether it has a process group, and torch's JSON."""

    initialised: bool
    groups: bytes  # an array for each group, in the order in which they were made (``rank/answers.py``)
    call: bytes  # of torch.distributed that it is in
    traces: tuple[bytes, ...]  # of its flight recorders
    outer: bytes = b""  # the outer frames of a deep stack, as a dump has them

    @classmethod
    def parse(cls, line: bytes) -> RankReply:
        """Read an answer without its number; ValueError for anything else."""
        initialised, groups, call, *traces = line.split(b"\t")
        call, _, outer = call.partition(b"|")
        return cls(initialised == b"1", groups, call, tuple(traces), outer.replace(b"\r", b"\n"))


def _ignore_reply(said: RankReply) -> None:
    """Nobody has asked, or waits any longer."""


class RankChannel:
    """The line of one rank."""

    def __init__(self, loop: EventLoop, on_failed: Callable[[str], None]) -> None:
        """``on_failed`` is called with the exception, or the ``sys.exit``, that has ended the rank's program.

        Raises:
            OSError: too many files are open.
        """
        self._loop = loop
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._coming = bytearray()
        self._serial = 0
        self.rank_fd = theirs.detach()  # the rank's end, which is to be handed over
        self.stack_signals = (0, 0)  # by which it writes its stacks: when Python comes to it, at once; 0 for none
        self.stacks_fd = 0  # the descriptor that it writes them to
        self.debug_signal = 0  # the signal on which it stops for a debugger; 0 for none
        self.profile_signal = 0  # the signal for ticks of a profile; 0 for none
        self.profile_armed = False  # whether it has been asked to catch that
        self.is_ready = False  # whether it has said so much as these
        self.has_thread = False  # whether its thread is there: it has called init_process_group
        self.bytes_received = 0  # bytes that it has said
        self._heard: Callable[[RankReply], None] = _ignore_reply
        self._on_failed = on_failed
        ours.setblocking(False)
        loop.watch_fd(ours.fileno(), self._on_readable)

    @property
    def taken_signals(self) -> tuple[int, ...]:
        """The signals that the rank catches for us."""
        return (*self.stack_signals, self.debug_signal, *([self.profile_signal] if self.profile_armed else []))

    def close(self) -> None:
        self._end()
        self._socket.close()

    def _end(self) -> None:
        """Read no more."""
        self.has_thread = False
        self.clear_reply_handler()
        if self._socket.fileno() >= 0:
            self._loop.unwatch_fd(self._socket.fileno())

    def read_pending(self) -> None:
        """Read what it has sent by now."""
        self._on_readable()

    def write_line(self, line: bytes) -> None:
        """Have it begin or end a profile."""
        try:
            self._socket.send(line + b"\n")
        except OSError:  # it has exited, or its buffer is full
            self.has_thread = False

    def request_state(self, *, details: bool) -> None:
        """Ask for its collectives; ``details``: for the last of them, too."""
        self._serial += 1
        self.write_line(b"%s%d" % (b"e" if details else b"s", self._serial))

    def request_exception(self) -> None:
        """Have it record the exception that it handles, at its next stack dump; one that answers does so by itself."""
        if not self.has_thread:
            self.write_line(b"n")

    def set_reply_handler(self, heard: Callable[[RankReply], None]) -> None:
        """Call ``heard`` with each answer, until ``clear_reply_handler``."""
        self._heard = heard

    def clear_reply_handler(self) -> None:
        self._heard = _ignore_reply

    def _on_readable(self) -> None:
        try:
            while data := self._socket.recv(_CHUNK):
                self._coming += data
                self.bytes_received += len(data)
                *lines, rest = self._coming.split(b"\n")
                self._coming = bytearray(rest)
                for line in lines:
                    self._handle_line(bytes(line))
                if len(self._coming) > _MAX_REPLY_BYTES:
                    self._coming.clear()
                    break
        except BlockingIOError:
            return
        except OSError:
            pass
        self._end()

    def _handle_line(self, line: bytes) -> None:
        """Take in a line; one that makes no sense, which the program itself must have written, says nothing."""
        word, *rest = line.split(b" ", 1)
        try:
            if word == b"h":
                first, second, self.stacks_fd, self.profile_signal = map(int, rest[0].split())
                self.stack_signals = first, second
                self.is_ready = True
            elif word == b"b":
                self.debug_signal = int(rest[0])
            elif word in (b"t", b"l"):
                self.has_thread = word == b"t"
            elif word == b"f":
                self._on_failed(sanitize_line(rest[0].decode(errors="replace"), 100))
            elif word == b"x":
                left = int(rest[0])
                self.stack_signals = self.stack_signals[0] if left else 0, self.stack_signals[1] if left > 1 else 0
            elif word[:1] in (b"s", b"e"):
                said = RankReply.parse(rest[0])
                if int(word[1:]) == self._serial:  # else it is late
                    self._heard(said)
        except (ValueError, IndexError):
            pass
