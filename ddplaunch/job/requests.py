"""What a client may ask of a running job, and what it is answered: plain data, checked as the nodes' messages are."""

from __future__ import annotations

from dataclasses import dataclass

from ddplaunch.diagnosis.inspection import Inspection
from ddplaunch.job.status import Status


@dataclass(frozen=True)
class Show:
    """Answer with the status."""


@dataclass(frozen=True)
class Look:
    """Answer with what all ranks are doing now; ``stacks``: and where in their code each of their threads is."""

    stacks: bool = False


@dataclass(frozen=True)
class Looked:
    """The status and what the ranks were doing: the answer to ``Look``."""

    status: Status
    inspection: Inspection


@dataclass(frozen=True)
class Stop:
    """End the job; ``now``: without the grace, and what has not ended then is killed."""

    now: bool = False


@dataclass(frozen=True)
class Stopping:
    """The job is being stopped: the answer to ``Stop``."""


Request = Show | Look | Stop
Answer = Status | Looked | Stopping
