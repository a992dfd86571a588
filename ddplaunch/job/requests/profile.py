"""Request for a profile: where the ranks spend their time."""

from __future__ import annotations

from ddplaunch.control.messages import ProfileReply
from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.profile import MAX_PROFILE_S
from ddplaunch.job.door import RequestContext
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import Seconds


@dataclass(frozen=True)
class ProfileJobRequest(Request[ProfileReply]):
    """Send the status, then the profile of each rank as it comes; the last reply ends it."""

    seconds: Seconds
    torch: bool = False  # with torch's own profiler

    answers = (Status, ProfileReply)

    def handle(self, context: RequestContext) -> None:
        def on_reply(message: ProfileReply) -> None:
            context.send(message)
            if message.is_last:
                context.finish()

        context.send(context.job.status())
        context.on_job_end(lambda code: None)  # without CONNECTION_TIMEOUT_S
        context.job.profile_job(min(self.seconds, MAX_PROFILE_S), self.torch, context.guard(on_reply))
