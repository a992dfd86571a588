"""Requests for the status of the job, to stop it, to wait for its end, and to show all output that it has printed."""

from __future__ import annotations

from ddplaunch.base.types import ExitCode, Name, TaggedMessage
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.core.control_socket.request import Request, RequestContext


class StatusQuery(Request[Status], frozen=True):
    """Request for the status of the job, sent once."""

    answers = (Status,)

    def handle(self, context: RequestContext) -> None:
        context.send(context.job.status())
        context.finish()


class StopReply(TaggedMessage, frozen=True):
    """Reply to ``StopJobRequest``: the job is being stopped."""


class StopJobRequest(Request[StopReply], frozen=True):
    """Stop the job; ``now``: kill it, without the grace."""

    now: bool = False
    command: Name = "ddplaunch stop"  # the command that requests it

    answers = (StopReply,)

    def handle(self, context: RequestContext) -> None:
        context.send(StopReply())
        context.finish()
        context.job.stop(self.now, self.command)


class JobEndReply(TaggedMessage, frozen=True):
    """The job has ended with this exit code."""

    code: ExitCode


class WaitRequest(Request[JobEndReply], frozen=True):
    """Send the status, then the exit code once the job has ended."""

    answers = (Status, JobEndReply)

    @property
    def is_streaming(self) -> bool:
        return True

    def handle(self, context: RequestContext) -> None:
        def on_end(code: int | None) -> None:
            if code is not None:
                context.send(JobEndReply(code))

        context.send(context.job.status())
        context.on_job_end(on_end)


class FlushReply(TaggedMessage, frozen=True):
    """Reply to ``FlushRequest``: the mark will be written."""


class FlushRequest(Request[FlushReply], frozen=True):
    """Show all output of this node's ranks up to now, then write this mark to the launcher's stdout and stderr."""

    mark: Name

    answers = (FlushReply,)

    def handle(self, context: RequestContext) -> None:
        context.job.streams.flush(f"{self.mark}\n".encode())
        context.send(FlushReply())
        context.finish()
