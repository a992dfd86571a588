"""Assembles a stream's bytes into lines, and applies \\r and cursor-up: overwritten progress bars are dropped."""

from __future__ import annotations

import re

MAX_LINE_BYTES = 1 << 20  # a longer line is split
_RETURN = re.compile(rb"\r(?!\n)")  # starts a progress bar; \r\n only ends a line
_TOKENS = re.compile(rb"\r|\n|\x1b\[A|[^\r\n\x1b]+|\x1b")
_MAX_ROWS = 8  # nested bars that may still be redrawn (tqdm moves the cursor down and up)
_MAX_BAR_BYTES = 4096  # of ``progress_bar``: more than a terminal is wide


class LineAssembler:
    """Assembles the lines of one stream, without I/O; the time is linear in the bytes, however they are split.

    A carriage return makes the row provisional: it is returned only once something follows below it, so a progress bar
    becomes one line at its end, however often it was drawn. Meanwhile ``progress_bar`` is the row drawn last.
    """

    def __init__(self) -> None:
        self._partial = bytearray()
        self._rows: list[bytearray] = []  # provisional rows, while a bar is being drawn
        self._row = 0
        self._drawn = bytearray()  # the row that was written last
        self._returned = False  # a carriage return came, so the next text overwrites the row
        self._redrawn = False  # the row was overwritten since the cursor last moved
        self._fresh = False  # the cursor came to the row by a newline
        self._held = b""  # an incomplete cursor movement at the end of the data
        self._undecided = False  # the data ended with a first carriage return: \r\n is still possible

    @property
    def progress_bar(self) -> bytes:
        return bytes(self._drawn[:_MAX_BAR_BYTES])

    def feed(self, data: bytes) -> bytes:
        """Add data; return the lines that are complete, each with its newline."""
        data, self._held = self._held + data, b""
        done: list[bytes | bytearray] = []
        position = 0
        if self._undecided and data:
            self._undecided = False
            if data.startswith(b"\n"):
                self._partial = self._rows.pop() + b"\r"
                self._drawn = bytearray()
        while position < len(data):
            position = (self._apply_cursor if self._rows else self._take_plain_lines)(data, position, done)
        if len(self._partial) > MAX_LINE_BYTES:
            done.append(self.close())
        return b"".join(done)

    def close(self) -> bytes:
        """Return the rest at the end of the stream, with a newline added if it has none."""
        if self._rows:
            self._rows[self._row] += self._held
        left = b"".join(row + b"\n" for row in (*self._rows, self._partial) if row)
        self._partial, self._held, self._undecided = bytearray(), b"", False
        self._rows, self._drawn = [], bytearray()
        return left

    def _take_plain_lines(self, data: bytes, start: int, done: list[bytes | bytearray]) -> int:
        """Add complete lines to ``done``, up to a progress bar; return the offset of the bar's row, or of the end."""
        match = _RETURN.search(data, start)
        end = max(start, data.rfind(b"\n", start, match.start() if match else len(data)) + 1)
        if end > start:
            if self._partial:
                done.append(self._partial)
                self._partial = bytearray()
            done.append(data[start:end])
        self._partial += data[end : match.start() if match else len(data)]
        if match is None:
            return len(data)
        self._drawn = self._partial
        self._rows, self._row, self._partial = [self._drawn], 0, bytearray()
        self._returned = self._redrawn = self._fresh = False
        self._undecided = match.end() == len(data)
        return match.start()

    def _apply_cursor(self, data: bytes, start: int, done: list[bytes | bytearray]) -> int:
        """Apply cursor movements to the provisional rows; return the offset where ordinary lines continue."""
        end = len(data)
        if data.endswith((b"\x1b", b"\x1b[")):
            end = data.rindex(b"\x1b")
        for match in _TOKENS.finditer(data, start, end):
            token = match[0]
            if token == b"\r":
                self._returned = True
            elif token == b"\n":
                self._row += 1
                if self._row == len(self._rows):
                    self._rows.append(bytearray())
                    self._finish(len(self._rows) - _MAX_ROWS, done)
                self._returned = self._redrawn = False
                self._fresh = True
            elif token == b"\x1b[A":
                self._row = max(0, self._row - 1)
                self._redrawn = self._fresh = False
            else:
                if self._returned:
                    if self._redrawn:  # redrawn without moving: a separate bar, so the rows above are final
                        self._finish(self._row, done)
                    self._rows[self._row] = bytearray(token)
                    self._returned, self._redrawn, self._fresh = False, True, False
                elif self._fresh and self._row:  # an ordinary line
                    self._finish(self._row, done)
                    self._rows, self._drawn = [], bytearray()
                    return match.start()
                else:
                    self._rows[self._row] += token
                self._drawn = self._rows[self._row]
                if len(self._drawn) > MAX_LINE_BYTES:
                    self._finish(len(self._rows), done)
                    self._drawn = bytearray()
                    return match.end()
        self._held = data[end:]
        return len(data)

    def _finish(self, count: int, done: list[bytes | bytearray]) -> None:
        """Add the upper ``count`` rows to ``done``: they will not be redrawn."""
        for row in self._rows[: max(0, count)]:
            row += b"\n"
            done.append(row)
        del self._rows[: max(0, count)]
        self._row = max(0, self._row - max(0, count))
