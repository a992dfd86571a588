"""Renders the results as a Markdown table: medians, the median of each round's ratio, and the target."""

import statistics
from dataclasses import dataclass, field

from tests.benchmarks.contenders import OURS
from tests.benchmarks.experiments import Experiment, Row, Values


@dataclass
class Results:
    """The turns of one experiment, a list a contender with one entry a round: its numbers, or why it failed."""

    experiment: Experiment
    turns: dict[str, list[Values | str]] = field(default_factory=dict)

    def add(self, contender: str, outcome: Values | str) -> None:
        self.turns.setdefault(contender, []).append(outcome)

    def numbers(self, contender: str, value: str) -> list[float | None]:
        """One entry a round; None where the turn failed or has no such number."""
        outcomes = self.turns.get(contender, [])
        return [None if isinstance(outcome, str) else outcome.get(value) for outcome in outcomes]

    def failures(self, contender: str) -> list[str]:
        return [outcome for outcome in self.turns.get(contender, []) if isinstance(outcome, str)]

    def ratios(self, row: Row) -> list[float]:
        """Return the ratios of ddplaunch to the other, one for each round."""
        ours = self.numbers(OURS, row.value)
        others = self.numbers(row.over or "", row.over_value or row.value)
        return [one / two for one, two in zip(ours, others, strict=False) if one is not None and two]


def table(all_results: list[Results], judged: bool = True) -> str:
    """All rows, and below them why turns failed; without ``judged`` no word on whether a target is met."""
    lines = [
        "| what | ddplaunch | others | ratio (lowest to highest) | target | met |",
        "|---|---|---|---|---|---|",
    ]
    for results in all_results:
        lines += [_line(results, row, judged) for row in results.experiment.rows]
    failed = [
        f"- {results.experiment.name}: {contender} failed {len(why)} of {len(results.turns[contender])} times: {why[0]}"
        for results in all_results
        for contender in results.turns
        if (why := results.failures(contender))
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _line(results: Results, row: Row, judged: bool) -> str:
    others = []
    for contender in results.experiment.turns:
        value = (row.over_value if contender == row.over else None) or row.value
        if contender != OURS and (results.failures(contender) or _known(results.numbers(contender, value))):
            others.append(f"{contender} {_cell(results, contender, value, row.unit)}")
    ours = _cell(results, OURS, row.value, row.unit)
    measured = results.ratios(row) if row.over else _known(results.numbers(OURS, row.value))
    ratio = f"{_spread(measured)} × {row.over}" if row.over and measured else "–"
    met = _met(row, measured) if judged else "–"
    return f"| {row.what} | {ours} | {'; '.join(others) or '–'} | {ratio} | {_target(row)} | {met} |"


def _cell(results: Results, contender: str, value: str, unit: str) -> str:
    numbers = _known(results.numbers(contender, value))
    if numbers:
        return f"{number(statistics.median(numbers))} {unit}".rstrip()
    return "failed" if results.failures(contender) else "–"


def _spread(ratios: list[float]) -> str:
    middle = f"{number(statistics.median(ratios))}"
    return middle if len(ratios) == 1 else f"{middle} ({number(min(ratios))} to {number(max(ratios))})"


def _target(row: Row) -> str:
    if row.limit is None:
        return "–"
    if row.over:
        return f"≤ {row.limit:g} × {row.over}"
    return f"≤ {row.limit:g} {row.unit}".rstrip()


def _met(row: Row, measured: list[float]) -> str:
    if row.limit is None:
        return "–"
    if not measured:
        return "**failed**"
    # A count that must be zero must be so in every round; a time has a median.
    worst = max(measured) if row.limit == 0 else statistics.median(measured)
    return "yes" if worst <= row.limit else "**no**"


def _known(numbers: list[float | None]) -> list[float]:
    return [number for number in numbers if number is not None]


def number(value: float) -> str:
    """Format a number with three significant digits, whole numbers in full."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
