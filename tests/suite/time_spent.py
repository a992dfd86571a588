"""Reports the time of a test run: a line for each part of ``tests/``, and the sum against a budget."""

import time
from collections import Counter, defaultdict

import pytest

from tests.scaled_timeouts import machine_slowness

BUDGET = 300.0
"""Seconds that ``pytest -n 5`` may take on two quiet cores."""

SLOWEST = 25
"""The number of tests that a run with a budget lists."""


def part(nodeid: str) -> str:
    """The folder of ``tests/`` with a test, or its file."""
    path = nodeid.partition("::")[0]
    return (path.partition("/")[2] or path).partition("/")[0]


class TimeSpent:
    """The plugin of the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._budget: float | None = config.option.budget
        self._began = time.monotonic()
        self._tests: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[part(report.nodeid)] += report.duration
        self._tests[part(report.nodeid)] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._tests) < 2 and self._budget is None:
            return
        terminalreporter.section("where the time went")
        for name, seconds in sorted(self._seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(_row(name, self._tests[name], seconds))
        spent = time.monotonic() - self._began
        total = f"{_row('all', self._tests.total(), sum(self._seconds.values()))}, in {spent:.0f} s"
        if self._budget is None:
            return terminalreporter.write_line(total)
        slow = machine_slowness()
        budget = f"{self._budget:.0f} s" + f" times {slow:.2f}, for the slowness of this machine" * (slow > 1.1)
        if spent <= self._budget * slow:
            terminalreporter.write_line(f"{total} of {budget}", green=True)
        else:
            terminalreporter.write_line(f"{total}: OVER THE BUDGET of {budget}", yellow=True, bold=True)


def _row(name: str, tests: int, seconds: float) -> str:
    return f"{name:20} {tests:5} tests {seconds:8.1f} s"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="SECONDS", help="warn where the run takes longer than this")


@pytest.hookimpl(trylast=True)  # once the budget is known
def pytest_configure(config: pytest.Config) -> None:
    if config.option.budget is not None and config.option.durations is None:
        config.option.durations = SLOWEST
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeSpent(config), "time-spent")
