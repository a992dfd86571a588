"""What the ranks are doing."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.inspection import Detail, Inspection
from ddplaunch.job.door import Asker
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status


@dataclass(frozen=True)
class JobInspected:
    """The status, and what the ranks were doing."""

    status: Status
    inspection: Inspection


@dataclass(frozen=True)
class InspectJob(Request[JobInspected]):
    """Answer with what all ranks are doing now.

    To find out which are slow (``PACE``) takes some time of each rank, so ask that every 10 s at most.
    """

    detail: Detail = Detail.STATE

    answers = (JobInspected,)

    def serve(self, asker: Asker) -> None:
        def inspected(inspection: Inspection) -> None:
            asker.send(JobInspected(asker.job.status(), inspection))
            asker.finish()

        asker.job.inspect(self.detail, inspected)
