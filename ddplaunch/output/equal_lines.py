"""Lines that several ranks print within a moment, to be shown once: held until their equals have come, or cannot come.

Pure: lines and the time go in, lines and the ranks that printed them come out. Each rank's lines wait in a queue. The
oldest leaves first, with its equals in other queues; what was printed before those leaves before, so that the lines of
a rank stay in their order.
"""

from __future__ import annotations

import math
import re
from collections import deque

HOLD_S = 0.2  # seconds that a line waits for its equals
MAX_LINES_PER_HOLD = 5000  # lines that may come in that time; where more do, none is held

_TRACEBACK_HEADER = b"Traceback (most recent call last):"
_LINE_OR_TRACEBACK = re.compile(rb"(?m)^(?:%s(?:\n .*)*|.*)$" % re.escape(_TRACEBACK_HEADER))
"""What is compared: lines, and a traceback's head with all below it but the last."""


MergedLines = tuple[tuple[int, ...], int, bytes]
"""Lines to show now: the ranks that printed each of them, the descriptor (1 or 2), and they."""


class LineMerger:
    """What ranks have printed and people have not seen yet."""

    def __init__(self, max_lines: float = MAX_LINES_PER_HOLD, *, ranks_unknown: bool = False) -> None:
        """``max_lines``: as ``MAX_LINES_PER_HOLD``. ``ranks_unknown``: it is not known how many ranks there are."""
        self._most = max_lines
        self._open = {number: {*[-1] * ranks_unknown} for number in (1, 2)}  # the ranks that may still print there
        self._queues: dict[int, deque[tuple[int, bytes]]] = {}  # by rank: descriptor and text
        self._holding: dict[tuple[int, bytes], dict[int, int]] = {}  # how often each rank's queue has a line
        self._left: dict[int, int] = {}  # how many lines have ever left a rank's queue
        self._arrived: deque[tuple[float, int, int]] = deque()  # when, whose, and how many will have left with them
        self._given: list[tuple[tuple[int, ...], int, list[bytes]]] = []
        self._began = 0.0
        self._count = 0  # of lines since then
        self._fast = False

    @property
    def next_flush_time(self) -> float | None:
        """When the oldest line is to be shown; None where none is held."""
        return self._arrived[0][0] + HOLD_S if self._oldest() is not None else None

    def add(self, rank: int, fd: int, lines: bytes, now: float) -> None:
        """Take whole lines, or none from a rank that will print there."""
        self._open[fd].add(rank)
        self.flush_until(now - HOLD_S)
        if not lines:
            return
        if now - self._began >= HOLD_S:
            self._fast = self._count > self._most and now - self._began < 2 * HOLD_S
            self._began, self._count = now, 0
        self._count += lines.count(b"\n") + (len(lines) >> 8)
        self._fast = self._fast or self._count > self._most
        if self._fast or (len(self._open[fd]) < 2 and self._oldest() is None):
            self.flush_until(math.inf)
            self._given.append(((rank,), fd, [lines]))
            return
        queue = self._queues.setdefault(rank, deque())
        if queue and queue[-1][0] == fd and queue[-1][1].startswith(_TRACEBACK_HEADER) and lines.startswith(b" "):
            begun = queue.pop()  # a traceback, of which more has come
            self._remove_line(rank, begun)
            lines = begun[1] + b"\n" + lines
        last = self._left.setdefault(rank, 0) + len(queue)
        complete = 0
        for text in _LINE_OR_TRACEBACK.findall(lines[:-1]) if _TRACEBACK_HEADER in lines else lines[:-1].split(b"\n"):
            line = fd, text
            queue.append(line)
            last += 1
            holding = self._holding.setdefault(line, {})
            holding[rank] = holding.get(rank, 0) + 1
            if len(holding) >= len(self._open[fd]) and self._open[fd] <= holding.keys():
                complete = last if _TRACEBACK_HEADER not in text else complete
        self._arrived.append((now, rank, last))
        while self._left[rank] < complete and (oldest := self._oldest()) is not None:
            self.emit_first(oldest)

    def flush_until(self, until: float) -> None:
        """Give out what came by then."""
        while (oldest := self._oldest()) is not None and self._arrived[0][0] <= until:
            self.emit_first(oldest)

    def held_count(self, rank: int) -> int:
        """How many lines of a rank are held."""
        return len(self._queues.get(rank, ()))

    def flush_rank(self, rank: int) -> None:
        """Give out what a rank has printed so far."""
        while self.held_count(rank):
            self.emit_first(rank)

    def close_stream(self, rank: int, number: int) -> None:
        """A rank prints there no more; when none prints anywhere, nothing is held any longer."""
        self._open[number].discard(rank)
        if not any(self._open.values()):
            self.flush_until(math.inf)

    def take_output(self) -> list[MergedLines]:
        """What has been given out since the last call, in order."""
        given, self._given = self._given, []
        return [(ranks, number, b"".join(parts)) for ranks, number, parts in given]

    def _oldest(self) -> int | None:
        """The rank whose first line has waited longest."""
        while self._arrived and self._left[self._arrived[0][1]] >= self._arrived[0][2]:
            self._arrived.popleft()
        return self._arrived[0][1] if self._arrived else None

    def emit_first(self, rank: int, waiting: frozenset[int] = frozenset()) -> None:
        """Give out a rank's first line with its equals; before that, what others printed before theirs.

        The queues of the ranks that are ``waiting`` for this stay as they are.
        """
        line = self._queues[rank][0]
        holding = self._holding[line]
        waiting |= {rank}
        for other in [*holding]:
            while other not in waiting and other in holding and self._queues[other][0] != line:
                self.emit_first(other, waiting)
        together = [rank, *(other for other in holding if other not in waiting and self._queues[other][0] == line)]
        for each in together:
            self._remove_line(each, self._queues[each].popleft())
            self._left[each] += 1
        ranks, (number, text) = tuple(sorted(together)), line
        if self._given and self._given[-1][:2] == (ranks, number):
            self._given[-1][2].append(text + b"\n")
        else:
            self._given.append((ranks, number, [text + b"\n"]))

    def _remove_line(self, rank: int, line: tuple[int, bytes]) -> None:
        """It has left the rank's queue."""
        holding = self._holding[line]
        holding[rank] -= 1
        if not holding[rank]:
            del holding[rank]
        if not holding:
            del self._holding[line]
