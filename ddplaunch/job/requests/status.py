"""How the job stands."""

from __future__ import annotations

from ddplaunch.dataclass import dataclass
from ddplaunch.job.door import Asker
from ddplaunch.job.requests import Request
from ddplaunch.job.status import Status


@dataclass(frozen=True)
class AskStatus(Request[Status]):
    """Answer with the status."""

    answers = (Status,)

    def serve(self, asker: Asker) -> None:
        asker.send(asker.job.status())
        asker.finish()
