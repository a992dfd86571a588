"""What ranks print: what is in memory, then what follows; a slow client misses some of it."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.job.door import RequestContext
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import Count, Name, Size, Timestamp

MAX_UNSENT_BYTES = 1 << 20  # bytes that a client has not read yet, over which it misses what comes
MAX_BACKLOG_BYTES = 32 << 20  # bytes of what all ranks had printed before


@dataclass(frozen=True)
class OutputChunk:
    """A piece of what a rank prints: there are any number, until the connection ends."""

    rank: Count
    data: bytes
    missed: Size = 0  # bytes before it that were left out, as the client did not keep up


@dataclass(frozen=True)
class TailOutputRequest(Request[OutputChunk]):
    """Answer with the status, then what these ranks of this node printed last; ``follow``: and what they then print.

    No ranks are all ranks. Of what was printed before, ``lines`` takes as many of the last lines, where 0 is all, and
    ``since`` what came since a moment.
    """

    ranks: tuple[Count, ...] = ()
    follow: bool = False
    lines: Count = 0
    since: Timestamp | None = None

    answers = (Status, OutputChunk)

    @property
    def is_streaming(self) -> bool:
        return self.follow

    def handle(self, asker: RequestContext) -> None:
        asker.send(asker.job.status())
        here = [rank for rank in asker.job.ranks_with_output() if rank in self.ranks or not self.ranks]
        for rank in here:
            if data := asker.job.output_tail(rank, self.since)[-(MAX_BACKLOG_BYTES // len(here)) :]:
                asker.send(OutputChunk(rank, last_lines(data, self.lines) if self.lines else data))
        if not self.follow:
            return asker.finish()
        follower = OutputSubscriber(asker, self.ranks)
        asker.job.subscribe_output(follower.listener)
        asker.on_job_end(follower.stop)


def last_lines(data: bytes, count: int) -> bytes:
    """The last lines of an output; an unfinished one counts."""
    at = len(data) - data.endswith(b"\n")
    for _ in range(count):
        at = data.rfind(b"\n", 0, max(0, at))
        if at < 0:
            return data
    return data[at + 1 :]


class OutputSubscriber:
    """Sends to one client what ranks print."""

    def __init__(self, asker: RequestContext, ranks: tuple[int, ...]) -> None:
        self._asker = asker
        self._wanted = frozenset(ranks)
        self._missed: dict[int, int] = {}  # bytes, by rank
        self.listener = asker.guard(self.on_output)

    def on_output(self, rank: int, data: bytes) -> None:
        """Send what a rank has printed, if the client wants it and keeps up."""
        if self._wanted and rank not in self._wanted:
            return
        if self._asker.unsent_bytes > MAX_UNSENT_BYTES:
            self._missed[rank] = self._missed.get(rank, 0) + len(data)
        else:
            self._asker.send(OutputChunk(rank, data, self._missed.pop(rank, 0)))

    def stop(self, code: int | None = None) -> None:
        """Send no more, but how much the client has missed since."""
        self._asker.job.unsubscribe_output(self.listener)
        for rank, missed in self._missed.items():
            self._asker.send(OutputChunk(rank, b"", missed))
        self._missed.clear()


@dataclass(frozen=True)
class FlushReply:
    """The mark is on its way."""


@dataclass(frozen=True)
class FlushRequest(Request[FlushReply]):
    """Show all that the ranks of this node have printed by now, and then this mark on the launcher's own streams."""

    mark: Name

    answers = (FlushReply,)

    def handle(self, asker: RequestContext) -> None:
        asker.job.flush_output(f"{self.mark}\n".encode())
        asker.send(FlushReply())
        asker.finish()
