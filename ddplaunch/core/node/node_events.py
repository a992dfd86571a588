"""What happens on a node: the input of ``NodeMachine``. (``core/events.py`` has what observers and the logs get.)

The events of the first part come from ``ZygoteClient``, which other parts of the launcher use too.
"""

from __future__ import annotations

from ddplaunch.core.failures import RankFailure
from ddplaunch.core.machine import DeadlineDue as DeadlineDue
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.machine import MessageReceived as MessageReceived
from ddplaunch.system.plan.rank_layout import Rank
from ddplaunch.system.processes.proc_utils import Usage


class NodeEvent(MachineEvent, frozen=True):
    """Base class of the events on this node."""


# ------------------------------------------------------------------------------------------------------ from the zygote


class ZygoteStarted(NodeEvent, frozen=True):
    """The zygote can start processes.

    ``failed``: why it imported its fallback; the rest is as in ``events.ZygoteReady``.
    """

    forks: bool
    failed: str | None = None
    unsafe: str | None = None
    seconds: float = 0.0


class ProcessSpawned(NodeEvent, frozen=True):
    rank: int
    pid: int
    pidfd: int | None = None


class SpawnFailed(NodeEvent, frozen=True):
    """A rank could not be started: no process or no file descriptor was available."""

    rank: int
    errno: int
    reason: str = ""


class ProcessExited(NodeEvent, frozen=True):
    rank: int
    pid: int
    code: int  # -N for signal N
    usage: Usage = (0, 0.0, 0.0)


class StoreExited(NodeEvent, frozen=True):
    """The process of the store has ended; the launcher never kills it."""

    pid: int
    code: int


class ProcessesSwept(NodeEvent, frozen=True):
    """The zygote has no descendants left; ``found`` and ``stuck`` are as in ``events.AttemptSwept``."""

    found: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()


class ZygoteSignalled(NodeEvent, frozen=True):
    """The zygote got a signal from this rank; None: the signal was sent to all processes, ranks included."""

    number: int
    rank: int | None = None


class ZygoteLost(NodeEvent, frozen=True):
    """The zygote has ended without an order of the launcher, or the launcher has killed it.

    ``how`` is set by the runner: how it ended, None if the launcher killed it.
    """

    how: str | None = None


# ------------------------------------------------------------------------------------------- from the rest of the node


class SignalArrived(NodeEvent, frozen=True):
    """The launcher got one of ``STOP_SIGNALS``; ``from_terminal``: its stderr is a terminal."""

    number: int
    from_terminal: bool = False


class ForwardableSignalArrived(NodeEvent, frozen=True):
    """The launcher got a signal that is for the ranks."""

    number: int


class StopCommanded(NodeEvent, frozen=True):
    """A command or a screen requests the stop, as Ctrl-C does; ``again``: as a second Ctrl-C does."""

    again: bool = False
    reason: str = ""


class OutputDrained(NodeEvent, frozen=True):
    """No rank can print any more, and what they printed is read."""


# ------------------------------------------------------------------------------------------------ replies to commands


class StartFailed(NodeEvent, frozen=True):
    """An error that the user can fix: ``OpenLog``, ``OpenStore`` or the import of a ``--preload`` module failed."""

    message: str
    hint: str | None = None
    is_final: bool = False  # whether no attempt can start on this node


class AttemptPrepared(NodeEvent, frozen=True):
    """Reply to ``PrepareAttempt``: the ranks of this node."""

    ranks: tuple[Rank, ...]
    zygote_ready: bool


class SpawnsWithdrawn(NodeEvent, frozen=True):
    """Reply to ``WithdrawSpawns``: these requests had not been sent, and are dropped."""

    ranks: tuple[int, ...]


class StopSent(NodeEvent, frozen=True):
    """Reply to ``StopRanks``: these ranks got the signal."""

    ranks: tuple[int, ...]


class EndExplained(NodeEvent, frozen=True):
    """Reply to ``ExplainEnd``: the rank's failure with its cause, if known; None: the stop signal ended the rank."""

    rank: int
    failure: RankFailure | None


class RemainingKilled(NodeEvent, frozen=True):
    """Reply to ``KillRemaining``: the processes that could not be killed."""

    stuck: tuple[str, ...] = ()


class OutputCollected(NodeEvent, frozen=True):
    """Reply to ``CollectOutput``: the last lines of ranks that failed, and whether a rank saw the preemption file."""

    tails: tuple[tuple[int, tuple[str, ...]], ...]
    preemption_seen: bool = False
