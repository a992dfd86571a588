"""What ``NodeMachine`` decides: the output of the machine. ``NodeRunner`` executes each command, with one effect.

The commands of the last part are questions: the reply is an event, which the machine gets before any other event.
"""

from __future__ import annotations

from ddplaunch.core.events import Event
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.machine import Command as Command
from ddplaunch.core.machine import Send as Send
from ddplaunch.core.messages import JoinAccepted, StartAttempt


class Emit(Command, frozen=True):
    """Emit an event to all observers."""

    event: Event


class ShowNote(Command, frozen=True):
    """Show a message to the user; ``of_job``: only where messages of the whole job are shown."""

    text: str
    of_job: bool = False


class ShowFooter(Command, frozen=True):
    """Show what the job waits for below the output."""

    text: str
    of_job: bool = False


class ShowJobMessages(Command, frozen=True):
    """Print messages about the whole job from now on: node 0 no longer prints them."""


class BeginAttempt(Command, frozen=True):
    """Call the features' ``on_attempt_start``, and deliver the signals that no earlier rank has got."""


class SpawnRank(Command, frozen=True):
    """Request the process of a rank from the zygote."""

    rank: int


class StopRank(Command, frozen=True):
    """Send SIGTERM to a rank that started while the others were being stopped."""

    rank: int


class SignalRanks(Command, frozen=True):
    """Send a signal to the ranks; ``only_handlers``: only to ranks that handle it: it would end others."""

    number: int
    only_handlers: bool = True


class CreatePreemptionFile(Command, frozen=True):
    """Create the file that notifies the ranks of a preemption; ``report_error``: show a note if that fails."""

    report_error: bool


class NotePreemptionHandlers(Command, frozen=True):
    """Record that a rank knows of the preemption, if one of the ranks handles this signal."""

    number: int


class Sweep(Command, frozen=True):
    """Have the zygote end all its descendants, with ``grace_s`` seconds between SIGTERM and SIGKILL."""

    grace_s: float


class CloseZygote(Command, frozen=True):
    """End the zygote, which has no ranks."""


class DrainOutput(Command, frozen=True):
    """Report with ``OutputDrained`` when all output is read; no process of the attempt is left."""


class SuspendJob(Command, frozen=True):
    """Stop the ranks and the launcher (Ctrl-Z), until SIGCONT."""


class InspectRanks(Command, frozen=True):
    """Have the features show what the ranks do (Ctrl-\\)."""


class EndWaits(Command, frozen=True):
    """A signal came after the job's end: soon wait for nothing more, unless the signal ends a wait of a feature."""

    delay_s: float


# --------------------------------------------------------------------------------------------------------- questions


class OpenLog(Command, frozen=True):
    """Open the log folder of the run that this node has joined; ``StartFailed`` if that fails."""

    joined: JoinAccepted


class OpenStore(Command, frozen=True):
    """Open the store of this attempt, on the node that hosts it; ``StartFailed`` if that fails."""


class PrepareAttempt(Command, frozen=True):
    """Plan the ranks of an attempt, and ensure that there is a zygote; the reply is ``AttemptPrepared``."""

    order: StartAttempt


class WithdrawSpawns(Command, frozen=True):
    """Drop requests for ranks that have not been sent yet; the reply is ``SpawnsWithdrawn``."""


class StopRanks(Command, frozen=True):
    """Send all ranks a signal to end; the reply is ``StopSent``.

    ``spare_failing``: not to those that are handling an exception, which end by themselves.
    """

    number: int
    spare_failing: bool = False


class ExplainEnd(Command, frozen=True):
    """Find out why a rank has ended: it may have recorded an exception. The reply is ``EndExplained``.

    ``failure``: what is known so far; ``peak_bytes``: most memory that it used; ``stopped``: it got a signal to end.
    """

    failure: RankFailure
    peak_bytes: int = 0
    stopped: bool = False


class KillZygote(Command, frozen=True):
    """Kill the zygote, which does not answer, and by that its ranks; the reply is ``ZygoteLost``."""


class KillRemaining(Command, frozen=True):
    """Kill the descendants of a lost zygote; the reply is ``RemainingKilled``."""


class CollectOutput(Command, frozen=True):
    """Close the output of the ranks; the reply is ``OutputCollected`` with the last lines of those that failed."""

    failed: tuple[int, ...]
