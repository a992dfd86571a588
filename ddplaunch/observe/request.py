"""Request for an inspection: what all ranks of the job are doing."""

from __future__ import annotations

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.types import Count, TaggedMessage, TextLine
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.request import Request, RequestContext, ServedJob
from ddplaunch.core.messages import RpcReply
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.rpc import KIND, read_inspection

MAX_LINE_CHARS = 200  # characters of a line


def last_output_line(printed: bytes) -> str:
    """Return the last line of an output that is not blank; of a progress bar its last state."""
    lines = printed[-4 * MAX_LINE_CHARS :].decode(errors="replace").replace("\r", "\n").split("\n")
    return sanitize_line(next((line for line in reversed(lines) if line.strip()), ""), MAX_LINE_CHARS)


def last_output_lines(job: ServedJob) -> tuple[tuple[int, str], ...]:
    """Return the last output line of each rank of this node."""
    return tuple((rank, last_output_line(job.streams.tail(rank))) for rank in job.streams.ranks_in_memory())


class JobInspection(TaggedMessage, frozen=True):
    """The status, and an inspection of all ranks."""

    status: Status
    inspection: Inspection
    last_lines: tuple[tuple[Count, TextLine], ...] = ()  # the last output line of each rank of this node, if requested


class InspectJobRequest(Request[JobInspection], frozen=True):
    """Inspect all ranks now.

    Finding slow ranks (``LATENESS``) takes some time of each rank, so request that every 10 s at most.
    """

    detail: Detail = Detail.STATE
    with_last_lines: bool = False  # whether to send the last output line of each rank too

    answers = (JobInspection,)

    def handle(self, context: RequestContext) -> None:
        def on_reply(reply: RpcReply) -> None:
            lines = last_output_lines(context.job) if self.with_last_lines else ()
            context.send(JobInspection(context.job.status(), read_inspection(reply), lines))
            context.finish()

        context.job.rpc.request(KIND.name, self.detail, KIND.timeout_s, context.guard(on_reply))
