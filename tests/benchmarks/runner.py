"""Runs experiments and renders their results: contenders take turns in each round, so a ratio compares neighbours."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.benchmarks.measure import Failed

Values = dict[str, float]
Turn = Callable[[], Values]
"""Runs one job of one contender, and returns numbers by name."""

OURS, TORCHRUN, SPAWN, IMPORT = "ddplaunch", "torchrun", "mp.spawn", "import torch"
"""Names of contenders."""


@dataclass(frozen=True)
class Size:
    """The sizes of the experiments, and how many rounds there are."""

    many: int = 8
    few: int = 4
    idle_s: float = 20.0
    lines: int = 200_000
    rounds: int = 5
    warm_up: bool = True


QUICK = Size(many=2, few=2, idle_s=1.0, lines=20_000, rounds=1, warm_up=False)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        value: which of a turn's numbers is shown.
        over: the contender that ours is divided by. over_value: its number, if that is another one.
    """

    what: str
    value: str
    unit: str
    over: str | None = None
    over_value: str | None = None


@dataclass
class Experiment:
    """What is measured, and the outcome of each turn by contender: its numbers, or why it failed.

    Attributes:
        rounds: the most rounds, for what is slow and steady.
    """

    turns: dict[str, Turn]
    rows: tuple[Row, ...]
    rounds: int = 1000
    outcomes: dict[str, list[Values | str]] = field(default_factory=dict)

    def measure(self, name: str, size: Size) -> None:
        for number in range(-size.warm_up, min(size.rounds, self.rounds)):
            for contender, turn in self.turns.items():
                began = time.monotonic()
                outcome: Values | str
                try:
                    outcome = turn()
                except Failed as failed:
                    outcome = str(failed)
                if number >= 0:
                    self.outcomes.setdefault(contender, []).append(outcome)
                shown = outcome if isinstance(outcome, str) else ", ".join(f"{k} {v:.4g}" for k, v in outcome.items())
                label = f"round {number + 1}" if number >= 0 else "warm-up"
                took = time.monotonic() - began
                print(f"{name}, {label}, {contender} ({took:.1f} s): {shown}", file=sys.stderr)

    def failures(self, contender: str) -> list[str]:
        return [outcome for outcome in self.outcomes.get(contender, []) if isinstance(outcome, str)]

    def numbers(self, contender: str, value: str) -> list[float | None]:
        """One entry a round; None where the turn failed or has no such number."""
        outcomes = self.outcomes.get(contender, [])
        return [None if isinstance(outcome, str) else outcome.get(value) for outcome in outcomes]

    def line(self, row: Row) -> str:
        """The row in Markdown: medians, and the median, lowest and highest ratio of a round."""
        ours = self.numbers(OURS, row.value)
        others = []
        for contender in self.turns:
            value = (row.over_value if contender == row.over else None) or row.value
            if contender != OURS and (cell := _cell(self.numbers(contender, value), row.unit)):
                others.append(f"{contender} {cell}")
        theirs = self.numbers(row.over or "", row.over_value or row.value)
        ratios = [one / two for one, two in zip(ours, theirs, strict=False) if one is not None and two]
        ratio = f"{number(statistics.median(ratios))} × {row.over}" if ratios else "–"
        if len(ratios) > 1:
            ratio += f" ({number(min(ratios))} to {number(max(ratios))})"
        return f"| {row.what} | {_cell(ours, row.unit) or 'failed'} | {'; '.join(others) or '–'} | {ratio} |"


def table(experiments: dict[str, Experiment]) -> str:
    """All rows, and below them why turns failed."""
    lines = ["| what | ddplaunch | others | ratio (lowest to highest) |", "|---|---|---|---|"]
    lines += [experiment.line(row) for experiment in experiments.values() for row in experiment.rows]
    failed = [
        f"- {name}: {contender} failed {len(why)} of {len(experiment.outcomes[contender])} times: {why[0]}"
        for name, experiment in experiments.items()
        for contender in experiment.turns
        if (why := experiment.failures(contender))
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _cell(numbers: list[float | None], unit: str) -> str:
    known = [each for each in numbers if each is not None]
    return f"{number(statistics.median(known))} {unit}".rstrip() if known else ""


def number(value: float) -> str:
    """Format a number with three significant digits, whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
