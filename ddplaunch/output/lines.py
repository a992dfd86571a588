"""Bytes of one stream into whole lines: what a terminal would still show, and nothing that was overwritten."""

from __future__ import annotations

import re

LONGEST = 1 << 20  # bytes without a newline up to which a line is kept whole; a longer one passes in pieces
_CURSOR = re.compile(rb"(\r|\n|\x1b\[A)")
_CUT = re.compile(rb"(\x1b\[?)?\Z")  # the beginning of a cursor movement at the end of what was read so far
_MAX_ROWS = 8  # rows of a stack of bars that may still be redrawn (tqdm nests by moving the cursor down and up)


class Lines:
    """Assembles one stream; pure, no descriptor.

    A carriage return makes what stood on the row provisional: it is given out only once something follows below it,
    so a progress bar is one line at its end, however often it was drawn. ``bar`` is the row last drawn meanwhile.
    """

    def __init__(self) -> None:
        self._partial = bytearray()
        self._rows: list[bytes] = []  # provisional rows, while a bar is being drawn
        self._row = 0
        self._returned = False  # a carriage return came, so the next text overwrites the row
        self._redrawn = False  # the row was overwritten since the cursor last moved
        self._fresh = False  # the cursor came to the row by a newline
        self._held = b""
        self.bar = b""

    def feed(self, data: bytes) -> bytes:
        """Take what was read; return the lines that are complete, each with its newline."""
        if self._rows or b"\r" in data.replace(b"\r\n", b"\n"):
            return self._draw(data)
        end = data.rfind(b"\n")
        if end < 0:
            self._partial += data
            return self.close() if len(self._partial) > LONGEST else b""
        complete = bytes(self._partial) + data[: end + 1] if self._partial else data[: end + 1]
        self._partial = bytearray(data[end + 1 :])
        return complete

    def close(self) -> bytes:
        """Return what is left at the end of the stream, with a newline if it had none."""
        left = b"".join(row + b"\n" for row in self._rows if row)
        self._rows, self.bar = [], b""
        if self._partial:
            left += bytes(self._partial) + b"\n"
            self._partial.clear()
        return left

    def _draw(self, data: bytes) -> bytes:
        """Follow the cursor over the few rows that a program still redraws."""
        done = b""
        if not self._rows:
            data = bytes(self._partial) + data
            cut = data.rfind(b"\n", 0, data.find(b"\r")) + 1
            done, data = data[:cut], data[cut:]
            self._partial.clear()
            self._rows, self._row = [b""], 0
            self._returned = self._redrawn = self._fresh = False
        data = self._held + data
        self._held = _CUT.search(data)[0]  # type: ignore[index]
        tokens = _CURSOR.split(data[: len(data) - len(self._held)])
        for place, token in enumerate(tokens):
            if token == b"\r":
                self._returned = True
            elif token == b"\n":
                self._row += 1
                if self._row == len(self._rows):
                    self._rows.append(b"")
                self._returned = self._redrawn = False
                self._fresh = True
            elif token == b"\x1b[A":
                self._row = max(0, self._row - 1)
                self._redrawn = self._fresh = False
            elif token and self._returned:
                if self._redrawn:  # drawn again without moving: a bar of its own, so what stands above is final
                    done += self._final(self._row)
                self._rows[self._row] = self.bar = token
                self._returned, self._redrawn, self._fresh = False, True, False
            elif token and self._fresh and self._row:  # an ordinary line
                done += self._final(self._row)
                self._rows, self.bar, self._fresh = [], b"", False
                self._partial = bytearray(token)
                held, self._held = self._held, b""
                return done + self.feed(b"".join(tokens[place + 1 :]) + held)
            elif token:
                self._rows[self._row] += token
                self.bar = self._rows[self._row]
        done += self._final(max(0, len(self._rows) - _MAX_ROWS))
        if max(map(len, self._rows)) > LONGEST:
            done += self._final(len(self._rows))
            self.bar, self._partial, self._held = b"", bytearray(self._held), b""
        return done

    def _final(self, count: int) -> bytes:
        """Give out the upper rows: nothing will be drawn over them."""
        rows = b"".join(row + b"\n" for row in self._rows[:count])
        del self._rows[:count]
        self._row = max(0, self._row - count)
        return rows
