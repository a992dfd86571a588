"""Request for an inspection: what all ranks of the job are doing."""

from __future__ import annotations

from msgspec.structs import replace

from ddplaunch.base.types import Count, TaggedMessage, TextLine
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.request import Request, RequestContext, ServedJob
from ddplaunch.core.messages import RpcReply
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.node.programs import inspect_programs
from ddplaunch.observe.output_lines import last_output_lines
from ddplaunch.observe.rpc import KIND, read_inspection


class JobInspection(TaggedMessage, frozen=True):
    """The status, and an inspection of all ranks."""

    status: Status
    inspection: Inspection
    last_lines: tuple[tuple[Count, TextLine], ...] = ()  # the last output line of each rank of this node, if requested


def make_job_inspection(job: ServedJob, inspection: Inspection, *, lines: bool) -> JobInspection:
    """Build the reply with an inspection and the job's status; ``lines``: with each rank's last output line.

    Nodes answer only once there are ranks. Before that, only the programs of this node are known.
    """
    status = job.status()
    if status.programs and not inspection.programs:
        inspection = replace(inspection, programs=inspect_programs(status.programs, job.streams))
    return JobInspection(status, inspection, last_output_lines(job) if lines else ())


class InspectJobRequest(Request[JobInspection], frozen=True):
    """Inspect all ranks now.

    Finding slow ranks (``LATENESS``) takes some time of each rank, so request that every 10 s at most.
    """

    detail: Detail = Detail.STATE
    with_last_lines: bool = False  # whether to send the last output line of each rank too

    answers = (JobInspection,)

    def handle(self, context: RequestContext) -> None:
        def on_reply(reply: RpcReply) -> None:
            inspection = read_inspection(reply)
            context.send(make_job_inspection(context.job, inspection, lines=self.with_last_lines))
            context.finish()

        context.job.rpc.request(KIND.name, self.detail, KIND.timeout_s, context.guard(on_reply))
