"""How the job stands, and its end: bringing it about, waiting for it."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.job.door import RequestContext
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import ExitCode, Name


@dataclass(frozen=True)
class StatusQuery(Request[Status]):
    """Answer with the status."""

    answers = (Status,)

    def handle(self, asker: RequestContext) -> None:
        asker.send(asker.job.status())
        asker.finish()


@dataclass(frozen=True)
class StopReply:
    """The job is being stopped."""


@dataclass(frozen=True)
class StopJobRequest(Request[StopReply]):
    """End the job; ``now``: without the grace, and what has not ended then is killed."""

    now: bool = False
    command: Name = "ddplaunch stop"  # which requests it

    answers = (StopReply,)

    def handle(self, asker: RequestContext) -> None:
        asker.send(StopReply())
        asker.finish()
        asker.call_soon(lambda: asker.job.stop(self.now, self.command))


@dataclass(frozen=True)
class JobEndReply:
    """The job has ended with this exit code."""

    code: ExitCode


@dataclass(frozen=True)
class WaitRequest(Request[JobEndReply]):
    """Answer with the status, then when the job has ended."""

    answers = (Status, JobEndReply)

    @property
    def is_streaming(self) -> bool:
        return True

    def handle(self, asker: RequestContext) -> None:
        def ended(code: int | None) -> None:
            if code is not None:
                asker.send(JobEndReply(code))

        asker.send(asker.job.status())
        asker.on_job_end(ended)
