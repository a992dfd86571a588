"""Requests for the output of ranks: what is in memory, then what follows; a slow client misses some of it."""

from __future__ import annotations

from ddplaunch.base.types import Count, Size, TaggedMessage, TextLine, Timestamp
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.core.output.screen import Source

MAX_UNSENT_BYTES = 1 << 20  # that a client has not read yet; beyond it, new output is dropped for this client
MAX_BACKLOG_BYTES = 32 << 20  # of earlier output, of all ranks together


class OutputChunk(TaggedMessage, frozen=True):
    """A piece of a rank's output; any number of them follow, until the connection ends."""

    rank: Count
    data: bytes
    missed: Size = 0  # bytes before it that were dropped, as the client did not keep up


class TailOutputRequest(Request[OutputChunk], frozen=True):
    """Request for the last output of these ranks of this node; ``follow``: also for their output from then on.

    No ranks means all ranks. Of the earlier output, ``lines`` limits it to the last lines (0: all), and ``since`` to
    the output since a moment.
    """

    ranks: tuple[Count, ...] = ()
    follow: bool = False
    lines: Count = 0
    since: Timestamp | None = None

    answers = (Status, OutputChunk)

    @property
    def is_streaming(self) -> bool:
        return self.follow

    def handle(self, context: RequestContext) -> None:
        context.send(context.job.status())
        streams = context.job.streams
        ranks = [rank for rank in streams.ranks_in_memory() if rank in self.ranks or not self.ranks]
        for rank in ranks:
            data = streams.tail(rank) if self.since is None else streams.since(rank, self.since)
            if data := data[-(MAX_BACKLOG_BYTES // len(ranks)) :]:
                context.send(OutputChunk(rank, last_lines(data, self.lines) if self.lines else data))
        if not self.follow:
            return context.finish()
        subscriber = OutputSubscriber(context, self.ranks)
        streams.subscribe(subscriber.listener)
        context.on_job_end(subscriber.stop)


class ProgramOutput(TaggedMessage, frozen=True):
    """Output of a program beside the ranks, and the names of all programs; a client that follows it gets more."""

    data: bytes
    known: tuple[TextLine, ...]


class ProgramOutputRequest(Request[ProgramOutput], frozen=True):
    """Request for the last output of a program, also of an ended one; ``follow``: also for its output from then on.

    ``lines``: how many of its last lines are sent at first (0: all).
    """

    program: TextLine
    lines: Count = 0
    follow: bool = False

    answers = (Status, ProgramOutput)

    @property
    def is_streaming(self) -> bool:
        return self.follow

    def handle(self, context: RequestContext) -> None:
        streams = context.job.streams
        data = streams.tail(self.program)
        known = tuple(each.program for each in context.job.status().programs)
        context.send(context.job.status())
        context.send(ProgramOutput(last_lines(data, self.lines) if self.lines else data, known))
        if not self.follow or self.program not in known:
            return context.finish()

        def on_output(source: Source, data: bytes) -> None:
            if source == self.program and context.unsent_bytes <= MAX_UNSENT_BYTES:
                context.send(ProgramOutput(data, known))

        listener = context.guard(on_output)
        streams.subscribe(listener)
        context.on_job_end(lambda code: streams.unsubscribe(listener))


def last_lines(data: bytes, count: int) -> bytes:
    """Return the last ``count`` lines of an output; an unfinished line counts."""
    at = len(data) - data.endswith(b"\n")
    for _ in range(count):
        at = data.rfind(b"\n", 0, max(0, at))
        if at < 0:
            return data
    return data[at + 1 :]


class OutputSubscriber:
    """Sends the output of ranks to one client, as the ranks print it."""

    def __init__(self, context: RequestContext, ranks: tuple[int, ...]) -> None:
        self._context = context
        self._wanted = frozenset(ranks)
        self._missed: dict[int, int] = {}  # bytes, by rank
        self.listener = context.guard(self.on_output)

    def on_output(self, rank: Source, data: bytes) -> None:
        """Send a chunk of a rank's output, if the client requested that rank and keeps up."""
        if isinstance(rank, str) or (self._wanted and rank not in self._wanted):
            return
        if self._context.unsent_bytes > MAX_UNSENT_BYTES:
            self._missed[rank] = self._missed.get(rank, 0) + len(data)
        else:
            self._context.send(OutputChunk(rank, data, self._missed.pop(rank, 0)))

    def stop(self, code: int | None = None) -> None:
        """End the subscription; send how many bytes the client has missed."""
        self._context.job.streams.unsubscribe(self.listener)
        for rank, missed in self._missed.items():
            self._context.send(OutputChunk(rank, b"", missed))
        self._missed.clear()
