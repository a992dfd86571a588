"""The result of a row: how each launcher ended, how that differs from what was expected, and its line in the table."""

import re
from dataclasses import dataclass, field

from tests.faults.rows import Expect, Row

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
            found.append(f"no {expect.text!r} in what it said")
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
