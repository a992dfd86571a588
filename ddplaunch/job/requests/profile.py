"""Where the ranks spend their time."""

from __future__ import annotations

from ddplaunch.control.messages import Profiled
from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.profile import LONGEST
from ddplaunch.job.door import Asker
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import Seconds


@dataclass(frozen=True)
class ProfileJob(Request[Profiled]):
    """Answer with the status, then with the profile of each rank as it comes, at last that it is over."""

    seconds: Seconds
    torch: bool = False  # with torch's own profiler

    answers = (Status, Profiled)

    def serve(self, asker: Asker) -> None:
        def hear(message: Profiled) -> None:
            asker.send(message)
            if message.over:
                asker.finish()

        asker.send(asker.job.status())
        asker.at_end(lambda code: None)  # it takes longer than other requests may
        asker.job.profile(min(self.seconds, LONGEST), self.torch, asker.guard(hear))
