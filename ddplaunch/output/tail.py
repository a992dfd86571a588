"""The last that a rank or sidecar printed, in memory: a ring of bytes, which costs one copy of what comes."""

from __future__ import annotations


class Tail:
    """Keeps the last ``limit`` bytes of a stream, and counts all of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0  # bytes that ever came
        self._ring = bytearray()  # grows to the limit
        self._next = 0  # where the next byte goes: the oldest is there, once the ring is full

    def add(self, data: bytes) -> None:
        self.total += len(data)
        view = memoryview(data)[-self.limit :]
        if room := self.limit - len(self._ring):
            self._ring += view[:room]
            view = view[room:]
        while view:
            count = min(len(view), self.limit - self._next)
            self._ring[self._next : self._next + count] = view[:count]
            self._next = (self._next + count) % self.limit
            view = view[count:]

    def last(self, count: int) -> bytes:
        """The last ``count`` bytes, or as many as there are."""
        count = min(count, len(self._ring))
        if count <= self._next:
            return bytes(self._ring[self._next - count : self._next])
        return bytes(self._ring[len(self._ring) - (count - self._next) :] + self._ring[: self._next])
