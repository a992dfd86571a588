"""Request for a profile: where the ranks spend their time."""

from __future__ import annotations

from ddplaunch.base.types import Seconds, TaggedMessage, TextLine
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.core.messages import RpcReply
from ddplaunch.features.profile.rank_profile import MAX_PROFILE_S, RankProfile
from ddplaunch.features.profile.rpc import KIND, ProfileRequest


class ProfileReply(TaggedMessage, frozen=True):
    """The profile of one rank, or the end of the replies."""

    profile: RankProfile | None
    is_last: bool
    silent_nodes: tuple[TextLine, ...] = ()  # without a reply: "node 2 (n2)"
    refusal: TextLine = ""  # why no profile is taken


class ProfileJobRequest(Request[ProfileReply], frozen=True):
    """Request to profile a job: the replies are the status, then each rank's profile as it comes, then the end."""

    seconds: Seconds
    torch: bool = False  # with torch's own profiler

    answers = (Status, ProfileReply)

    def handle(self, context: RequestContext) -> None:
        def on_reply(message: RpcReply) -> None:
            context.send(ProfileReply(message.payload, message.is_last, message.silent_nodes, message.refusal))
            if message.is_last:
                context.finish()

        context.send(context.job.status())
        context.on_job_end(lambda code: None)  # without CONNECTION_TIMEOUT_S
        request = ProfileRequest(min(self.seconds, MAX_PROFILE_S), self.torch)
        context.job.rpc.request(KIND.name, request, request.timeout_s, context.guard(on_reply))
