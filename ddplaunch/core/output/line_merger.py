"""Merges identical lines of several ranks: holds each line up to 0.2 s until every rank has printed it, or cannot.

Pure, without descriptors or clock. Each rank's lines are in a queue. The oldest line leaves first, with equal lines of
other queues. In each queue, earlier lines leave before it, so that the lines of a rank stay in order.
"""

from __future__ import annotations

import math
import re
from collections import deque

HOLD_S = 0.2  # that a line is held, to be merged with equal ones
MAX_LINES_PER_HOLD = 5000  # with more lines in that time, no line is held

_TRACEBACK_HEADER = b"Traceback (most recent call last):"
_LINE_OR_TRACEBACK = re.compile(rb"(?m)^(?:%s(?:\n .*)*|.*)$" % re.escape(_TRACEBACK_HEADER))
"""The units that are compared: single lines, and a traceback's header with all its lines but the last."""


MergedLines = tuple[tuple[int, ...], int, bytes]
"""Lines to show now: the ranks that printed each of them, the descriptor (1 or 2), and the text."""


class LineMerger:
    """Buffers the lines of all ranks and emits them, merged where equal; poll with ``take_output``."""

    def __init__(self, max_lines: float = MAX_LINES_PER_HOLD, *, ranks_unknown: bool = False) -> None:
        """``max_lines``: as ``MAX_LINES_PER_HOLD``. ``ranks_unknown``: the number of ranks is not known."""
        self._max_lines = max_lines
        self._open = {number: {*[-1] * ranks_unknown} for number in (1, 2)}  # by descriptor: ranks that may still print
        self._queues: dict[int, deque[tuple[int, bytes]]] = {}  # by rank: descriptor and text
        self._holding: dict[tuple[int, bytes], dict[int, int]] = {}  # how often each rank's queue has a line
        self._emitted: dict[int, int] = {}  # by rank: lines that have left its queue so far
        self._arrived: deque[tuple[float, int, int]] = deque()  # time, rank, and its ``_emitted`` once these have left
        self._output: list[tuple[tuple[int, ...], int, list[bytes]]] = []
        self._window_start = 0.0  # the rate is counted per ``HOLD_S``
        self._window_lines = 0
        self._fast = False  # too many lines: none is held

    @property
    def next_flush_time(self) -> float | None:
        """The time at which the oldest held line must be emitted; None if no line is held."""
        return self._arrived[0][0] + HOLD_S if self._rank_of_oldest_line() is not None else None

    def add(self, rank: int, fd: int, lines: bytes, now: float) -> None:
        """Add complete lines of a rank; with ``b""``, only register that the rank will print to this descriptor."""
        self._open[fd].add(rank)
        self.flush_until(now - HOLD_S)
        if not lines:
            return
        if now - self._window_start >= HOLD_S:
            self._fast = self._window_lines > self._max_lines and now - self._window_start < 2 * HOLD_S
            self._window_start, self._window_lines = now, 0
        self._window_lines += lines.count(b"\n") + (len(lines) >> 8)
        self._fast = self._fast or self._window_lines > self._max_lines
        if self._fast or (len(self._open[fd]) < 2 and self._rank_of_oldest_line() is None):
            self.flush_until(math.inf)
            self._output.append(((rank,), fd, [lines]))
            return
        queue = self._queues.setdefault(rank, deque())
        if queue and queue[-1][0] == fd and queue[-1][1].startswith(_TRACEBACK_HEADER) and lines.startswith(b" "):
            partial = queue.pop()  # a traceback that these lines continue
            self._remove_line(rank, partial)
            lines = partial[1] + b"\n" + lines
        last = self._emitted.setdefault(rank, 0) + len(queue)
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
        while self._emitted[rank] < complete and (oldest := self._rank_of_oldest_line()) is not None:
            self.emit_first_line(oldest)

    def flush_until(self, until: float) -> None:
        """Emit the lines that arrived up to this time."""
        while (oldest := self._rank_of_oldest_line()) is not None and self._arrived[0][0] <= until:
            self.emit_first_line(oldest)

    def held_count(self, rank: int) -> int:
        """The number of held lines of a rank."""
        return len(self._queues.get(rank, ()))

    def flush_rank(self, rank: int) -> None:
        """Emit all held lines of a rank."""
        while self.held_count(rank):
            self.emit_first_line(rank)

    def close_stream(self, rank: int, number: int) -> None:
        """Called when a rank has closed the descriptor; once all are closed, every held line is emitted."""
        self._open[number].discard(rank)
        if not any(self._open.values()):
            self.flush_until(math.inf)

    def take_output(self) -> list[MergedLines]:
        """Return the lines emitted since the last call, in order."""
        output, self._output = self._output, []
        return [(ranks, number, b"".join(parts)) for ranks, number, parts in output]

    def _rank_of_oldest_line(self) -> int | None:
        """The rank whose first line is the oldest; None if no line is held."""
        while self._arrived and self._emitted[self._arrived[0][1]] >= self._arrived[0][2]:
            self._arrived.popleft()
        return self._arrived[0][1] if self._arrived else None

    def emit_first_line(self, rank: int, waiting: frozenset[int] = frozenset()) -> None:
        """Emit a rank's first line, merged with equal ones, after the lines that precede those in other queues.

        ``waiting``: ranks whose own first line waits for this call (recursion); their queues are not changed.
        """
        line = self._queues[rank][0]
        holding = self._holding[line]
        waiting |= {rank}
        for other in [*holding]:
            while other not in waiting and other in holding and self._queues[other][0] != line:
                self.emit_first_line(other, waiting)
        together = [rank, *(other for other in holding if other not in waiting and self._queues[other][0] == line)]
        for each in together:
            self._remove_line(each, self._queues[each].popleft())
            self._emitted[each] += 1
        ranks, (number, text) = tuple(sorted(together)), line
        if self._output and self._output[-1][:2] == (ranks, number):
            self._output[-1][2].append(text + b"\n")
        else:
            self._output.append((ranks, number, [text + b"\n"]))

    def _remove_line(self, rank: int, line: tuple[int, bytes]) -> None:
        """Count down ``_holding`` for a line that has left the rank's queue."""
        holding = self._holding[line]
        holding[rank] -= 1
        if not holding[rank]:
            del holding[rank]
        if not holding:
            del self._holding[line]
