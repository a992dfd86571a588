"""Our end of the socket on which a rank says where it stands (``rank/answers.py`` has the other, and the words)."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import shown
from ddplaunch.loop import Loop

_MAX_LINE = 16 << 20  # bytes: 2,000 collectives are one million
_CHUNK = 1 << 18


@dataclass(frozen=True)
class RankAnswer:
    """What a rank answered: whether it has a process group, and torch's JSON."""

    initialised: bool
    groups: bytes  # an array for each group, in the order in which they were made (``rank/answers.py``)
    call: bytes  # of torch.distributed that it is in
    traces: tuple[bytes, ...]  # of its flight recorders
    outer: bytes = b""  # the outer frames of a deep stack, as a dump has them

    @classmethod
    def parse(cls, line: bytes) -> RankAnswer:
        """Read an answer without its number; ValueError for anything else."""
        initialised, groups, call, *traces = line.split(b"\t")
        call, _, outer = call.partition(b"|")
        return cls(initialised == b"1", groups, call, tuple(traces), outer.replace(b"\r", b"\n"))


def _ignore(said: RankAnswer) -> None:
    """Nobody has asked, or waits any longer."""


class RankLine:
    """The line of one rank."""

    def __init__(self, loop: Loop, on_failed: Callable[[str], None]) -> None:
        """``on_failed`` is called with the exception, or the ``sys.exit``, that has ended the rank's program.

        Raises:
            OSError: too many files are open.
        """
        self._loop = loop
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._coming = bytearray()
        self._serial = 0
        self.given = theirs.detach()  # the rank's end, which is to be handed over
        self.signals = (0, 0)  # by which it writes its stacks: when Python comes to it, at once; 0 for none
        self.stacks = 0  # the descriptor that it writes them to
        self.stops = 0  # the signal on which it stops for a debugger; 0 for none
        self.ticks = 0  # the signal for ticks of a profile; 0 for none
        self.profiled = False  # whether it has been asked to catch that
        self.begun = False  # whether it has said so much as these
        self.answers = False  # whether its thread is there: it has called init_process_group
        self.taken = 0  # bytes that it has said
        self._heard: Callable[[RankAnswer], None] = _ignore
        self._on_failed = on_failed
        ours.setblocking(False)
        loop.watch(ours.fileno(), self._read)

    @property
    def taken_signals(self) -> tuple[int, ...]:
        """The signals that the rank catches for us."""
        return (*self.signals, self.stops, *([self.ticks] if self.profiled else []))

    def close(self) -> None:
        self._end()
        self._socket.close()

    def _end(self) -> None:
        """Read no more."""
        self.answers = False
        self.rest()
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())

    def catch_up(self) -> None:
        """Read what it has sent by now."""
        self._read()

    def say(self, line: bytes) -> None:
        """Have it begin or end a profile."""
        try:
            self._socket.send(line + b"\n")
        except OSError:  # it has exited, or its buffer is full
            self.answers = False

    def ask(self, *, details: bool) -> None:
        """Ask for its collectives; ``details``: for the last of them, too."""
        self._serial += 1
        self.say(b"%s%d" % (b"e" if details else b"s", self._serial))

    def request_exception(self) -> None:
        """Have it record the exception that it handles, at its next stack dump; one that answers does so by itself."""
        if not self.answers:
            self.say(b"n")

    def listen(self, heard: Callable[[RankAnswer], None]) -> None:
        """Call ``heard`` with each answer, until ``rest``."""
        self._heard = heard

    def rest(self) -> None:
        self._heard = _ignore

    def _read(self) -> None:
        try:
            while data := self._socket.recv(_CHUNK):
                self._coming += data
                self.taken += len(data)
                *lines, rest = self._coming.split(b"\n")
                self._coming = bytearray(rest)
                for line in lines:
                    self._take(bytes(line))
                if len(self._coming) > _MAX_LINE:
                    self._coming.clear()
                    break
        except BlockingIOError:
            return
        except OSError:
            pass
        self._end()

    def _take(self, line: bytes) -> None:
        """Take in a line; one that makes no sense, which the program itself must have written, says nothing."""
        word, *rest = line.split(b" ", 1)
        try:
            if word == b"h":
                first, second, self.stacks, self.ticks = map(int, rest[0].split())
                self.signals = first, second
                self.begun = True
            elif word == b"b":
                self.stops = int(rest[0])
            elif word in (b"t", b"l"):
                self.answers = word == b"t"
            elif word == b"f":
                self._on_failed(shown(rest[0].decode(errors="replace"), 100))
            elif word == b"x":
                left = int(rest[0])
                self.signals = self.signals[0] if left else 0, self.signals[1] if left > 1 else 0
            elif word[:1] in (b"s", b"e"):
                said = RankAnswer.parse(rest[0])
                if int(word[1:]) == self._serial:  # else it is late
                    self._heard(said)
        except (ValueError, IndexError):
            pass
