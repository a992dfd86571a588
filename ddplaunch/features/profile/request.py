"""Request for a profile: where the ranks spend their time."""

from __future__ import annotations

from ddplaunch.base.types import Seconds
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.core.messages import ProfileReply
from ddplaunch.features.profile.rank_profile import MAX_PROFILE_S


class ProfileJobRequest(Request[ProfileReply], frozen=True):
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
