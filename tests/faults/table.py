"""Renders the fault matrix as a table in Markdown."""

from collections.abc import Sequence

from tests.faults.result import Result, Seen
from tests.faults.trial import END_TIMEOUT_S

HEAD = "| Fault | restarts | launcher | node 0 | node 1 | left running | |\n|---|---|---|---|---|---|---|"


def line(result: Result) -> str:
    """One row of the table."""
    nodes = [
        _node(seen, END_TIMEOUT_S[result.launcher], goes_on=result.goes_on, verdict=not result.row.survives)
        for seen in result.seen
    ]
    nodes[2:] = []
    nodes += ["–"] * (2 - len(nodes))
    left = dict.fromkeys(each.split(" -")[0] for seen in result.seen for each in seen.left)
    complaints = result.complaints()
    cells = [
        result.row.name,
        str(result.restarts),
        result.launcher,
        *nodes,
        ", ".join(left).replace("|", "\\|") or "nothing",
        "✗ " + "; ".join(complaints).replace("|", "\\|") if complaints else "✓",
    ]
    return "| " + " | ".join(cells) + " |"


def _node(seen: Seen, timeout_s: float, *, goes_on: bool, verdict: bool) -> str:
    """Exit code and time, as ``137 · 0.21 s``; without a time where the job just had to live on."""
    if seen.code is None:
        return f"> {timeout_s:g} s"
    code = "killed" if seen.code == -9 else str(seen.code)
    if seen.code == -9 or not verdict or seen.seconds is None:
        return code
    return f"{code} · {seen.seconds:.2f} s" + (" (restart)" if goes_on else "")


def table(results: Sequence[Result]) -> str:
    """Render the whole table."""
    return "\n".join([HEAD, *map(line, results)]) + "\n"
