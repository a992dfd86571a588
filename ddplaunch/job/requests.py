"""What a client may ask of a running job, and what it is answered: plain data, checked as the nodes' messages are."""

from __future__ import annotations

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.inspection import Inspection
from ddplaunch.job.status import Status

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Count, ExitCode, Size


@dataclass(frozen=True)
class Show:
    """Answer with the status."""


@dataclass(frozen=True)
class InspectJob:
    """Answer with what all ranks are doing now; ``stacks``: and where in their code each of their threads is.

    ``pace``, without ``stacks``: who is slow; that takes some time of each rank, so ask it every 10 s at most.
    """

    stacks: bool = False
    pace: bool = False


@dataclass(frozen=True)
class JobInspected:
    """The status and what the ranks were doing: the answer to ``InspectJob``."""

    status: Status
    inspection: Inspection


@dataclass(frozen=True)
class StopJob:
    """End the job; ``now``: without the grace, and what has not ended then is killed."""

    now: bool = False


@dataclass(frozen=True)
class Stopping:
    """The job is being stopped: the answer to ``StopJob``."""


@dataclass(frozen=True)
class TailRanks:
    """Answer with the status, then what these ranks of this node printed last; ``follow``: and what they then print.

    None are all ranks. There is no answer where too many follow the job already.
    """

    ranks: tuple[Count, ...] = ()
    follow: bool = False


@dataclass(frozen=True)
class Printed:
    """A piece of what a rank prints: there are any number, until the connection ends."""

    rank: Count
    data: bytes
    missed: Size = 0  # bytes before it that were left out, as the client did not keep up


@dataclass(frozen=True)
class WaitForEnd:
    """Answer with the status, then when the job has ended."""


@dataclass(frozen=True)
class Over:
    """The job has ended with this exit code: the last answer to ``WaitForEnd``."""

    code: ExitCode


Request = Show | InspectJob | StopJob | TailRanks | WaitForEnd
Answer = Status | JobInspected | Stopping | Printed | Over
