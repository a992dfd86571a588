"""A row of the fault matrix, what is expected of it on each node, and its result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.trial import Trial

Action = Callable[["Trial"], object]

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


END_TIMEOUT_S = {"ddplaunch": 30.0, "torchrun": 60.0}
"""Seconds that any wait of ours takes at most: how long a launcher is watched after the fault. All of these are
those of a quiet machine."""

HEAD = "| Fault | restarts | launcher | node 0 | node 1 | left running | |\n|---|---|---|---|---|---|---|"


@dataclass
class Seen:
    """How one launcher ended.

    Attributes:
        code: its exit code; None: it still ran.
        seconds: from the fault to its verdict; None: there was none.
        left: the command lines of what still ran on its host, if that is up. files: temporary ones.
    """

    code: int | None
    seconds: float | None
    stderr: str
    left: list[str]
    files: list[str]


@dataclass
class Result:
    """How a row ended; ``stuck`` is what the row waited for in vain."""

    row: Row
    launcher: str
    restarts: int
    seen: list[Seen] = field(default_factory=list)
    stuck: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the job must survive the fault."""
        return self.row.survives or (self.row.restarts and self.restarts > 0)

    def complaints(self, allowance: float = 0.0) -> list[str]:
        """List what is wrong, with ``allowance`` seconds added to the time limits.

        Codes, words, bounds and temporary files are our own contract: torchrun need only end as well or badly as the
        job did, on every node, while it is watched, and leave nothing running.
        """
        found = [self.stuck] if self.stuck else []
        for number, (seen, expect) in enumerate(zip(self.seen, self.row.expect, strict=False)):
            where = f"launcher {number}: "
            code = 0 if self.goes_on and expect.code != 2 else expect.code
            if seen.code is None:
                found.append(where + "still running")
            elif bool(seen.code) != bool(code) or (self.launcher == "ddplaunch" and seen.code != code):
                found.append(where + f"exit code {seen.code}, not {code}")
            if seen.left:
                found.append(where + f"left {len(seen.left)} running")
            if self.launcher == "ddplaunch":
                found += [where + each for each in self._broken(seen, expect, allowance)]
        return found

    def _broken(self, seen: Seen, expect: Expect, allowance: float) -> list[str]:
        """Find what of our contract beyond exit codes was not kept."""
        found = []
        if not re.search(expect.text, seen.stderr):
            found.append(f"no {expect.text!r} in its stderr")
        if "restart 1 of" in seen.stderr and not (self.row.restarts and self.restarts):
            found.append("the ranks were started again")
        judged = expect.code > 0 or (self.row.restarts and self.restarts > 0)
        if judged and seen.seconds is None:
            found.append("no verdict")
        elif judged and seen.seconds is not None and seen.seconds > expect.within + allowance:
            found.append(f"{seen.seconds:.2f} s, where {expect.within:g} s are the bound")
        if seen.files:
            found.append(f"left the files {', '.join(seen.files)}")
        return found

    def line(self) -> str:
        """One row of the table in Markdown."""
        nodes = [*map(self._ending, self.seen[:2]), *["–"] * (2 - len(self.seen))]
        left = ", ".join(dict.fromkeys(each.split(" -")[0] for seen in self.seen for each in seen.left)) or "nothing"
        verdict = "; ".join(self.complaints())
        cells = [self.row.name, str(self.restarts), self.launcher, *nodes, left, f"✗ {verdict}" if verdict else "✓"]
        return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"

    def _ending(self, seen: Seen) -> str:
        """Exit code and time, as ``137 · 0.21 s``; without a time where the job just had to live on."""
        if seen.code is None:
            return f"> {END_TIMEOUT_S[self.launcher]:g} s"
        code = "killed" if seen.code == -9 else str(seen.code)
        if seen.code == -9 or self.row.survives or seen.seconds is None:
            return code
        return f"{code} · {seen.seconds:.2f} s" + (" (restart)" if self.goes_on else "")
