"""How the job stands."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.job.requests import Asker, Question
from ddplaunch.job.status import Status


@dataclass(frozen=True)
class AskStatus(Question[Status]):
    """Answer with the status."""

    answers = (Status,)

    def serve(self, asker: Asker) -> None:
        asker.send(asker.job.status())
        asker.finish()
