"""Selects the tests of a run: those that are named, or all without the mark ``ci``; reports what was deselected."""

import gc
from collections import Counter
from collections.abc import Generator

import pytest

from tests.suite.time_spent import BUDGET, part

EVERY_DAY = "not ci"
"""The marks of tests to run if none are named. ``pytest tests`` names all, ``pytest tests/slurm`` some."""

_DESELECTED = "deselected"

RUN_FIRST = (
    "slurm",
    "gridengine",
    "test_preload_audit.py",
    "test_imports.py",
    "test_size_limits.py",
    "test_glossary.py",
)
"""Parts for the first worker: some take longest and run one after the other, others parse all sources once a worker."""


class SelectionReport:
    """The plugin that counts deselected and skipped tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._deselected: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected.update(part(item.nodeid) for item in items)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_DESELECTED] = dict(self._deselected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Called when a worker of xdist has ended; all have deselected the same tests."""
        self._deselected = Counter(getattr(node, "workeroutput", {}).get(_DESELECTED) or self._deselected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._skipped:
            terminalreporter.section("skipped")
            for reason, count in self._skipped.most_common():
                terminalreporter.write_line(f"skipped: {count} test{'s' * (count != 1)}: {reason}")
        if self._deselected and self._config.option.markexpr == EVERY_DAY:
            terminalreporter.section("left to .ci/run, or pytest tests")
            parts = [f"{name} {count}" for name, count in sorted(self._deselected.items())]
            terminalreporter.write_line(", ".join(parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the collected items from garbage collection, which would traverse them again and again."""
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
    if getattr(option, "dist", "") == "load":
        option.dist = "worksteal"  # the chunks of "load" left one worker busy alone for a minute
    config.pluginmanager.register(SelectionReport(config), "not-run")
