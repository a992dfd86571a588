"""Which hosts are connected to when: so many at once as those who let us in take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

ALL = 32
"""Connections that are being made at once, as many as pdsh(1) makes; one counts until the far end has spoken."""

ONE_WAY = 8
"""Of these through one machine: sshd refuses some from the 10th on that has not logged in (MaxStartups)."""

TRIES = 4
"""Times that a host is tried where somebody on the way refuses or closes the connection."""

PAUSE = 1.0
"""Seconds before each further try."""


class Turns:
    """The hosts that still wait to be connected to, by their node ranks.

    One that was refused on the way is tried again, and those who go that way are then half as many: the machine there
    takes fewer than it does as a rule, or lets others in too.
    """

    def __init__(self, ways: Sequence[str]) -> None:
        """``ways``: for each host the machine that lets us in, itself or a jump host."""
        self._ways = ways
        self._waiting = list(range(len(ways)))
        self._tried = Counter[int]()
        self._connecting: dict[int, int] = {}  # to the number of its turn
        self._count = 0
        self._most = dict.fromkeys(ways, ONE_WAY)
        self._narrowed = dict.fromkeys(ways, 0)  # the first turn that was given since

    def take(self) -> Iterator[int]:
        """Give out the hosts to connect to now."""
        busy = Counter(self._ways[node] for node in self._connecting)
        for node in list(self._waiting):
            way = self._ways[node]
            if len(self._connecting) < ALL and busy[way] < self._most[way]:
                self._waiting.remove(node)
                busy[way] += 1
                self._count += 1
                self._tried[node] += 1
                self._connecting[node] = self._count
                yield node

    def done(self, node: int) -> None:
        """The far end of this host has spoken, or will not."""
        self._connecting.pop(node, None)

    def refused(self, node: int) -> bool:
        """Note that somebody on the way refused; return whether the host is to be put ``back`` after a pause."""
        way, turn = self._ways[node], self._connecting.pop(node, 0)
        if turn > self._narrowed[way]:  # else it is one of those who were too many together
            self._most[way] = max(1, self._most[way] // 2)
            self._narrowed[way] = self._count
        return self._tried[node] < TRIES

    def back(self, node: int) -> None:
        """Let a host wait for another turn."""
        self._waiting.append(node)

    def clear(self) -> None:
        """Connect to no more."""
        self._waiting.clear()
