"""The events that ``ProgramsMachine`` handles. Programs are numbered as in its list."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.core.machine import DeadlineDue as DeadlineDue
from ddplaunch.features.programs.program_commands import Life


class ProgramEvent(Struct, frozen=True):
    """Base class of the events of programs."""


class AttemptBegins(ProgramEvent, frozen=True):
    """Node 0 begins an attempt: all programs start, those of an earlier attempt after their end."""

    attempt: int


class GuardStarted(ProgramEvent, frozen=True):
    life: Life


class ReadyElsewhere(ProgramEvent, frozen=True):
    """These programs of other nodes are ready."""

    names: tuple[str, ...]


class ProgramSpawned(ProgramEvent, frozen=True):
    number: int


class ProgramStartFailed(ProgramEvent, frozen=True):
    number: int
    reason: str


class ConditionMet(ProgramEvent, frozen=True):
    """The program meets the condition under which it is ready."""

    number: int


class ProgramExited(ProgramEvent, frozen=True):
    number: int
    code: int  # -N for signal N
    last_words: str = ""  # the last line that it has printed


class StopExpected(ProgramEvent, frozen=True):
    """The job got a signal to end; the programs may have got it too."""


class RanksStopped(ProgramEvent, frozen=True):
    """The ranks are being stopped by this signal."""

    signal: int


class JobFinished(ProgramEvent, frozen=True):
    """No rank is left, and none will start; mains get this signal."""

    signal: int


class KillRequested(ProgramEvent, frozen=True):
    """A further signal after the end of the job: kill what is left."""


class GuardSwept(ProgramEvent, frozen=True):
    life: Life
    stuck: tuple[str, ...] = ()  # processes that cannot be killed


class GuardLost(ProgramEvent, frozen=True):
    life: Life


Event = ProgramEvent | DeadlineDue
