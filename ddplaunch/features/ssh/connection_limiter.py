"""Limits concurrent SSH connections: at most as many at once as the hosts and jump hosts accept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

MAX_CONCURRENT = 32  # as many as pdsh(1) makes; a connection counts until `remote_launcher` runs
MAX_PER_GATEWAY = 8  # of these through one machine: sshd refuses some if more than 10 have not logged in (MaxStartups)
MAX_ATTEMPTS = 4  # for a host when it or a jump host refuses or closes the connection
RETRY_DELAY_S = 1.0  # before each retry


class ConnectionLimiter:
    """Queue of the hosts that wait for a connection, by their node ranks.

    A refused host is tried again, and the limit of its gateway is halved: that machine accepts fewer connections than
    usual, or serves others too.
    """

    def __init__(self, gateways: Sequence[str]) -> None:
        self._gateways = gateways  # of each host the machine that ssh connects to: itself or a jump host
        self._waiting = list(range(len(gateways)))
        self._attempts = Counter[int]()
        self._connecting: dict[int, int] = {}  # node rank to the number of its connection
        self._count = 0
        self._limit = dict.fromkeys(gateways, MAX_PER_GATEWAY)
        self._halved_at = dict.fromkeys(gateways, 0)  # the last connection before the limit was halved

    def next_hosts(self) -> Iterator[int]:
        """Yield the hosts to connect to now."""
        busy = Counter(self._gateways[node] for node in self._connecting)
        for node in list(self._waiting):
            gateway = self._gateways[node]
            if len(self._connecting) < MAX_CONCURRENT and busy[gateway] < self._limit[gateway]:
                self._waiting.remove(node)
                busy[gateway] += 1
                self._count += 1
                self._attempts[node] += 1
                self._connecting[node] = self._count
                yield node

    def release(self, node: int) -> None:
        """Called when ``remote_launcher`` runs on this host, or never will."""
        self._connecting.pop(node, None)

    def on_refused(self, node: int) -> bool:
        """Called when a connection was refused; return whether to ``requeue`` the host after RETRY_DELAY_S."""
        gateway, number = self._gateways[node], self._connecting.pop(node, 0)
        if number > self._halved_at[gateway]:  # else it was started before the limit was halved
            self._limit[gateway] = max(1, self._limit[gateway] // 2)
            self._halved_at[gateway] = self._count
        return self._attempts[node] < MAX_ATTEMPTS

    def requeue(self, node: int) -> None:
        """Add a host to the queue again."""
        self._waiting.append(node)

    def clear(self) -> None:
        """Make no more connections."""
        self._waiting.clear()
