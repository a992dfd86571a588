"""What the ranks are doing."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.inspection import Detail, Inspection
from ddplaunch.errors import shown
from ddplaunch.job.door import Asker, ServedJob
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import Count, Line

MOST = 200  # characters of a line


def last_line(printed: bytes) -> str:
    """The last line of an output that is not blank; of a progress bar its last state."""
    lines = printed[-4 * MOST :].decode(errors="replace").replace("\r", "\n").split("\n")
    return shown(next((line for line in reversed(lines) if line.strip()), ""), MOST)


def last_of(job: ServedJob) -> tuple[tuple[int, str], ...]:
    """The last line of each rank of this node."""
    return tuple((rank, last_line(job.printed(rank))) for rank in job.ranks())


@dataclass(frozen=True)
class JobInspected:
    """The status, and what the ranks were doing."""

    status: Status
    inspection: Inspection
    said: tuple[tuple[Count, Line], ...] = ()  # the last line of each rank of this node, where asked for


@dataclass(frozen=True)
class InspectJob(Request[JobInspected]):
    """Answer with what all ranks are doing now.

    To find out which are slow (``PACE``) takes some time of each rank, so ask that every 10 s at most.
    """

    detail: Detail = Detail.STATE
    lines: bool = False  # whether the last line of each rank is wanted too

    answers = (JobInspected,)

    def serve(self, asker: Asker) -> None:
        def inspected(inspection: Inspection) -> None:
            said = last_of(asker.job) if self.lines else ()
            asker.send(JobInspected(asker.job.status(), inspection, said))
            asker.finish()

        asker.job.inspect(self.detail, asker.guard(inspected))
