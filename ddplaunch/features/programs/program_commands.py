"""The commands of ``ProgramsMachine``. Programs are numbered as in its list."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from ddplaunch.core.node.commands import KillRemaining as KillRemaining
from ddplaunch.core.node.commands import ShowFooter as ShowFooter
from ddplaunch.core.node.commands import ShowNote as ShowNote


class Life(Enum):
    """How long programs live; each value has its own guard, a zygote that kills what these programs leave behind."""

    JOB = "job"  # sidecars
    ATTEMPT = "attempt"  # mains and services


class ProgramCommand(Struct, frozen=True):
    """Base class of the commands about programs."""


class StartGuard(ProgramCommand, frozen=True):
    life: Life


class Spawn(ProgramCommand, frozen=True):
    number: int


class Probe(ProgramCommand, frozen=True):
    """Check at intervals whether the program is ready, for example by a request to its port."""

    number: int


class SendSignal(ProgramCommand, frozen=True):
    number: int
    signal: int


class KillLeftovers(ProgramCommand, frozen=True):
    """Kill the leftover processes of an ended program before it starts again."""

    number: int


class OpenGate(ProgramCommand, frozen=True):
    """Let the ranks start: all programs that they wait for are ready."""

    attempt: int


class ReportReady(ProgramCommand, frozen=True):
    number: int


class ReportFailure(ProgramCommand, frozen=True):
    attempt: int
    code: int  # the exit code of the job
    reason: str
    number: int | None  # of the program whose last lines say more
    ranks_run: bool


class ReportMainDone(ProgramCommand, frozen=True):
    """Report that a main has ended with exit code 0."""

    number: int


class ReportMainEnded(ProgramCommand, frozen=True):
    """Report that a main has ended with another exit code, or is not started any more."""

    number: int


class SweepGuard(ProgramCommand, frozen=True):
    """Have the guard end all processes that its programs have left: SIGTERM, and SIGKILL after ``grace_s`` seconds."""

    life: Life
    grace_s: float


class KillGuard(ProgramCommand, frozen=True):
    life: Life


class CloseGuard(ProgramCommand, frozen=True):
    life: Life


Command = ProgramCommand | ShowNote | ShowFooter | KillRemaining
