"""What the ranks are doing."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.inspection import Detail, Inspection
from ddplaunch.errors import sanitize_line
from ddplaunch.job.door import RequestContext, ServedJob
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import Count, TextLine

MAX_LINE_CHARS = 200  # characters of a line


def last_output_line(printed: bytes) -> str:
    """The last line of an output that is not blank; of a progress bar its last state."""
    lines = printed[-4 * MAX_LINE_CHARS :].decode(errors="replace").replace("\r", "\n").split("\n")
    return sanitize_line(next((line for line in reversed(lines) if line.strip()), ""), MAX_LINE_CHARS)


def last_output_lines(job: ServedJob) -> tuple[tuple[int, str], ...]:
    """The last line of each rank of this node."""
    return tuple((rank, last_output_line(job.output_tail(rank))) for rank in job.ranks_with_output())


@dataclass(frozen=True)
class JobInspection:
    """The status, and what the ranks were doing."""

    status: Status
    inspection: Inspection
    last_lines: tuple[tuple[Count, TextLine], ...] = ()  # the last line of each rank of this node, where asked for


@dataclass(frozen=True)
class InspectJobRequest(Request[JobInspection]):
    """Answer with what all ranks are doing now.

    To find out which are slow (``PACE``) takes some time of each rank, so ask that every 10 s at most.
    """

    detail: Detail = Detail.STATE
    with_last_lines: bool = False  # whether the last line of each rank is wanted too

    answers = (JobInspection,)

    def handle(self, asker: RequestContext) -> None:
        def inspected(inspection: Inspection) -> None:
            said = last_output_lines(asker.job) if self.with_last_lines else ()
            asker.send(JobInspection(asker.job.status(), inspection, said))
            asker.finish()

        asker.job.inspect_job(self.detail, asker.guard(inspected))
