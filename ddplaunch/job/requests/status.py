"""How the job stands, and its end: bringing it about, waiting for it."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.job.door import Asker
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status
from ddplaunch.wire.bounds import ExitCode, Name


@dataclass(frozen=True)
class AskStatus(Request[Status]):
    """Answer with the status."""

    answers = (Status,)

    def serve(self, asker: Asker) -> None:
        asker.send(asker.job.status())
        asker.finish()


@dataclass(frozen=True)
class Stopping:
    """The job is being stopped."""


@dataclass(frozen=True)
class StopJob(Request[Stopping]):
    """End the job; ``now``: without the grace, and what has not ended then is killed."""

    now: bool = False
    command: Name = "ddplaunch stop"  # which requests it

    answers = (Stopping,)

    def serve(self, asker: Asker) -> None:
        asker.send(Stopping())
        asker.finish()
        asker.soon(lambda: asker.job.stop(self.now, self.command))


@dataclass(frozen=True)
class Over:
    """The job has ended with this exit code."""

    code: ExitCode


@dataclass(frozen=True)
class WaitForEnd(Request[Over]):
    """Answer with the status, then when the job has ended."""

    answers = (Status, Over)

    @property
    def lasts(self) -> bool:
        return True

    def serve(self, asker: Asker) -> None:
        def ended(code: int | None) -> None:
            if code is not None:
                asker.send(Over(code))

        asker.send(asker.job.status())
        asker.at_end(ended)
