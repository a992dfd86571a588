"""One client that reads what ranks print: what is in memory, then what follows; a slow one misses some of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.job.requests import Printed, TailRanks

if TYPE_CHECKING:
    from ddplaunch.job.door import ServedJob
    from ddplaunch.job.requests import Request
    from ddplaunch.wire.connection import Connection

MAX_WAITING = 1 << 20  # bytes that it has not read yet, over which it misses what comes
MAX_BEFORE = 32 << 20  # bytes of what all ranks had printed before


class Follower:
    """Sends to one client."""

    def __init__(self, client: Connection[Request], job: ServedJob, request: TailRanks) -> None:
        self._client, self._job = client, job
        self._wanted = frozenset(request.ranks)
        self._missed: dict[int, int] = {}  # bytes, by rank
        here = [rank for rank in job.ranks() if rank in self._wanted or not self._wanted]
        for rank in here:
            if data := job.printed(rank)[-(MAX_BEFORE // len(here)) :]:
                client.send(Printed(rank, data))
        if request.follow:
            job.listen(self.hear)

    def hear(self, rank: int, data: bytes) -> None:
        """Send what a rank has printed, if the client wants it and keeps up."""
        if self._wanted and rank not in self._wanted:
            return
        if self._client.waiting > MAX_WAITING:
            self._missed[rank] = self._missed.get(rank, 0) + len(data)
        else:
            self._client.send(Printed(rank, data, self._missed.pop(rank, 0)))

    def leave(self) -> None:
        """Send no more, but how much the client has missed since."""
        self._job.forget(self.hear)
        for rank, missed in self._missed.items():
            self._client.send(Printed(rank, b"", missed))
        self._missed.clear()
