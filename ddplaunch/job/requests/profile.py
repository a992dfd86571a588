"""Where the ranks spend their time."""

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
    """Answer with the status, then with the profile of each rank as it comes, at last that it is over."""

    seconds: Seconds
    torch: bool = False  # with torch's own profiler

    answers = (Status, ProfileReply)

    def handle(self, asker: RequestContext) -> None:
        def hear(message: ProfileReply) -> None:
            asker.send(message)
            if message.is_last:
                asker.finish()

        asker.send(asker.job.status())
        asker.on_job_end(lambda code: None)  # it takes longer than other requests may
        asker.job.profile_job(min(self.seconds, MAX_PROFILE_S), self.torch, asker.guard(hear))
