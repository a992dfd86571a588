"""The data of a row of the fault matrix: the fault, when it happens, and what is expected on each node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.trial import Trial

Action = Callable[["Trial"], None]

HEARTBEAT = 2.0
"""The --heartbeat-timeout of all rows, in seconds: the least that there is."""

SOCKET = 1.0
"""Seconds from the fault to the report where a closed connection shows it."""

SILENCE = HEARTBEAT + 1.0
"""Seconds where only missing heartbeats show it."""

LOST = 69
"""The exit code where a node was lost or never came."""


@dataclass(frozen=True)
class Expect:
    """How one launcher must end.

    Attributes:
        code: its exit code, as ``subprocess`` has it: -9 is one that the fault itself killed.
        text: a regular expression that its stderr must match.
        within: seconds from the fault, or from its end where this node was stopped by it, to the verdict.
    """

    code: int
    text: str = ""
    within: float = SOCKET


DEAD = Expect(-9)
"""The fault was its end."""

WELL = Expect(0)
"""It survives, and ends when the test stops the job."""


def lost(number: int, within: float = SOCKET) -> Expect:
    """The report that this node was lost."""
    return Expect(LOST, rf"node {number} .*was lost", within)


def both(code: int, text: str = "", within: float = SOCKET) -> tuple[Expect, Expect]:
    """The same on both nodes."""
    return Expect(code, text, within), Expect(code, text, within)


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        fault: makes it happen; None: the start itself is the fault.
        when: brings the job to where the fault happens.
        expect: one for each launcher, in the order in which they are started; normally those of node 0 and node 1.
        mode: what the ranks do, as ``program`` has it; those that do not "talk" start sooner, without torch.
        options: for every launcher, beyond those that say who is who.
        restarts: whether --max-restarts 1 leads to a second attempt, which trains and ends with 0.
        survives: whether the job must live through it; it is stopped then by the test.
        torchrun: whether there is such a thing with torchrun.
    """

    name: str
    fault: Action | None
    when: Action
    expect: tuple[Expect, ...]
    mode: str = "talk"
    options: tuple[str, ...] = ()
    restarts: bool = False
    survives: bool = False
    torchrun: bool = True

    @property
    def restarts_that_matter(self) -> tuple[int, ...]:
        """The values of --max-restarts that lead to different ends, and so are tested.

        Where there is to be no second attempt, the end has to be the same although a restart would be allowed, and
        where none is allowed that says less.
        """
        return (0, 1) if self.restarts else (1,)
