"""When to connect to which host: as many at once as the machines on the way accept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

MAX_CONCURRENT = 32  # connections to make at once, as many as pdsh(1) makes; one counts until `ssh.remote` runs there
MAX_PER_GATEWAY = (
    8  # of these, through one machine: sshd refuses some when more than 10 have not logged in (MaxStartups)
)
MAX_ATTEMPTS = 4  # tries for a host when a machine on the way refuses or closes the connection
RETRY_DELAY_S = 1.0  # seconds before each further try


class ConnectionLimiter:
    """The hosts that wait for a connection, by their node ranks.

    A refused host is tried again, and from then on half as many connect through that machine at once: it accepts fewer
    than usual, or serves others too.
    """

    def __init__(self, gateways: Sequence[str]) -> None:
        self._ways = gateways  # for each host the machine that lets us in: itself or a jump host
        self._waiting = list(range(len(gateways)))
        self._tried = Counter[int]()
        self._connecting: dict[int, int] = {}  # a host, to the number of its turn
        self._count = 0
        self._most = dict.fromkeys(gateways, MAX_PER_GATEWAY)
        self._narrowed = dict.fromkeys(gateways, 0)  # the last turn before it was halved

    def next_hosts(self) -> Iterator[int]:
        """The hosts to connect to now."""
        busy = Counter(self._ways[node] for node in self._connecting)
        for node in list(self._waiting):
            way = self._ways[node]
            if len(self._connecting) < MAX_CONCURRENT and busy[way] < self._most[way]:
                self._waiting.remove(node)
                busy[way] += 1
                self._count += 1
                self._tried[node] += 1
                self._connecting[node] = self._count
                yield node

    def release(self, node: int) -> None:
        """``ssh.remote`` runs on this host, or never will."""
        self._connecting.pop(node, None)

    def on_refused(self, node: int) -> bool:
        """Note that a machine on the way refused; return whether to put the host ``requeue`` after a pause."""
        way, turn = self._ways[node], self._connecting.pop(node, 0)
        if turn > self._narrowed[way]:  # else it was refused together with the one before
            self._most[way] = max(1, self._most[way] // 2)
            self._narrowed[way] = self._count
        return self._tried[node] < MAX_ATTEMPTS

    def requeue(self, node: int) -> None:
        """Let a host wait for its next turn."""
        self._waiting.append(node)

    def clear(self) -> None:
        """Connect to no more."""
        self._waiting.clear()
