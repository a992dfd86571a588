"""Selects the tests of a run: those that are named, or those without the mark ``ci``; reports what was left out."""

import gc
from collections import Counter
from collections.abc import Generator

import pytest

from tests.suite.time_spent import BUDGET, part

EVERY_DAY = "not ci"
"""What runs where nothing is named. ``pytest tests`` names all, ``pytest tests/slurm`` a part."""

_LEFT_OUT = "left out"

RUN_FIRST = ("slurm", "gridengine")
"""Parts whose tests take longest and must run one after the other: a worker that began them last would run alone."""


class SelectionReport:
    """The plugin that counts what was left out and what was skipped."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left.update(part(item.nodeid) for item in items)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_LEFT_OUT] = dict(self._left)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """A worker of xdist has ended; each has left out the same."""
        self._left = Counter(getattr(node, "workeroutput", {}).get(_LEFT_OUT) or self._left)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._skipped:
            terminalreporter.section("skipped")
            for reason, count in self._skipped.most_common():
                terminalreporter.write_line(f"skipped: {count} test{'s' * (count != 1)}: {reason}")
        if self._left and self._config.option.markexpr == EVERY_DAY:
            terminalreporter.section("left to .ci/run, or pytest tests")
            terminalreporter.write_line(", ".join(f"{name} {count}" for name, count in sorted(self._left.items())))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what the collection makes from the garbage collector, which would visit it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: part(item.nodeid) not in RUN_FIRST)


@pytest.hookimpl(tryfirst=True)  # before xdist hands its workers the options
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not option.markexpr and not option.keyword:
        option.markexpr = EVERY_DAY
        option.budget = BUDGET if option.budget is None else option.budget
    config.pluginmanager.register(SelectionReport(config), "not-run")
