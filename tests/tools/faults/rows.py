"""Rows of the fault matrix: the fault, the expected outcome on each node, and the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tools.faults.trial import Trial

Action = Callable[["Trial"], object]

HEARTBEAT = 2.0
"""The --heartbeat-timeout of all rows, in seconds: the smallest allowed."""

SOCKET = 1.0
"""Seconds from the fault to the report if a closed connection shows it."""

SILENCE = HEARTBEAT + 1.0
"""Seconds from the fault to the report if only missing heartbeats show it."""

LOST = 69
"""The exit code if a node was lost or never joined."""


@dataclass(frozen=True)
class Expect:
    """How one launcher must end.

    Attributes:
        code: its exit code, as ``subprocess`` has it: -9 is one that the fault itself killed.
        text: a regular expression that its stderr must match.
        within: seconds from the fault, or from its end if it stopped this node, to the report.
    """

    code: int
    text: str = ""
    within: float = SOCKET


DEAD = Expect(-9)
"""The fault kills it."""

WELL = Expect(0)
"""It survives the fault, and exits with 0 when the test ends the job."""


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
        fault: causes it; None: the start itself is the fault.
        when: brings the job to the moment of the fault.
        expect: one for each launcher, in the order of their start; normally those of node 0 and node 1.
        mode: of ``program``; ranks that do not "talk" start sooner, without torch.
        options: for every launcher, except those of its node.
        restarts: whether --max-restarts 1 leads to a second attempt, which trains and ends with 0.
        survives: whether the job must survive it, until the test ends it.
        torchrun: whether the row is possible with torchrun.
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
        """The values of --max-restarts to test.

        Without a second attempt the outcome has to be the same for both, and the test with 1 shows more.
        """
        return (0, 1) if self.restarts else (1,)


END_TIMEOUT_S = {"ddplaunch": 30.0, "torchrun": 60.0}
"""Seconds, on a quiet machine, after which no event of the job is waited for any more."""

HEAD = "| Fault | restarts | launcher | node 0 | node 1 | left running | |\n|---|---|---|---|---|---|---|"


@dataclass
class LauncherOutcome:
    """How one launcher ended.

    Attributes:
        code: its exit code; None: it still runs.
        seconds: from the fault to its report; None: there was none.
        leftovers: the command lines of processes that still run on its host, if that is up.
        files: its temporary files that are left.
    """

    code: int | None
    seconds: float | None
    stderr: str
    leftovers: list[str]
    files: list[str]


@dataclass
class Result:
    """The outcome of a row; ``stuck`` is what the row waited for in vain."""

    row: Row
    launcher: str
    restarts: int
    outcomes: list[LauncherOutcome] = field(default_factory=list)
    stuck: str = ""

    @property
    def must_continue(self) -> bool:
        """Whether the job must continue after the fault."""
        return self.row.survives or (self.row.restarts and self.restarts > 0)

    def list_errors(self, allowance: float = 0.0) -> list[str]:
        """List what is wrong, with ``allowance`` seconds added to the time limits.

        torchrun need only succeed or fail as the job did, on every node and in time, and leave nothing running. Codes,
        messages, time limits and temporary files are checked for ddplaunch alone.
        """
        found = [self.stuck] if self.stuck else []
        for number, (outcome, expect) in enumerate(zip(self.outcomes, self.row.expect, strict=False)):
            where = f"launcher {number}: "
            code = 0 if self.must_continue and expect.code != 2 else expect.code
            if outcome.code is None:
                found.append(where + "still running")
            elif bool(outcome.code) != bool(code) or (self.launcher == "ddplaunch" and outcome.code != code):
                found.append(where + f"exit code {outcome.code}, not {code}")
            if outcome.leftovers:
                found.append(where + f"left {len(outcome.leftovers)} running")
            if self.launcher == "ddplaunch":
                found += [where + each for each in self._list_detail_errors(outcome, expect, allowance)]
        return found

    def _list_detail_errors(self, outcome: LauncherOutcome, expect: Expect, allowance: float) -> list[str]:
        """List what is wrong with messages, time limits and temporary files."""
        found = []
        if not re.search(expect.text, outcome.stderr):
            found.append(f"no {expect.text!r} in its stderr")
        if "restart 1 of" in outcome.stderr and not (self.row.restarts and self.restarts):
            found.append("the ranks were started again")
        must_report = expect.code > 0 or (self.row.restarts and self.restarts > 0)
        if must_report and outcome.seconds is None:
            found.append("no verdict")
        elif must_report and outcome.seconds is not None and outcome.seconds > expect.within + allowance:
            found.append(f"{outcome.seconds:.2f} s, where {expect.within:g} s are the bound")
        if outcome.files:
            found.append(f"left the files {', '.join(outcome.files)}")
        return found

    def render_row(self) -> str:
        """Render the row of the Markdown table."""
        nodes = [*map(self._format_outcome, self.outcomes[:2]), *["–"] * (2 - len(self.outcomes))]
        left = (
            ", ".join(dict.fromkeys(each.split(" -")[0] for outcome in self.outcomes for each in outcome.leftovers))
            or "nothing"
        )
        verdict = "; ".join(self.list_errors())
        cells = [self.row.name, str(self.restarts), self.launcher, *nodes, left, f"✗ {verdict}" if verdict else "✓"]
        return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"

    def _format_outcome(self, outcome: LauncherOutcome) -> str:
        """Format exit code and time, as ``137 · 0.21 s``; without a time if the job just had to continue."""
        if outcome.code is None:
            return f"> {END_TIMEOUT_S[self.launcher]:g} s"
        code = "killed" if outcome.code == -9 else str(outcome.code)
        if outcome.code == -9 or self.row.survives or outcome.seconds is None:
            return code
        return f"{code} · {outcome.seconds:.2f} s" + (" (restart)" if self.must_continue else "")
