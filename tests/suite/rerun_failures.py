"""Runs a failed test once more, alone, after all others: if it passes then, the run passes, and shows the rerun.

If a second test fails, the run has failed, and nothing is repeated. The plugin belongs to the process that reports:
pytest's own, or xdist's controller after its last worker.
"""

import time
from collections.abc import Generator
from contextlib import suppress

import pytest

HELD = "held"
"""The outcome of a failure that is reported only after the rerun."""


class RerunFailure:
    """The plugin; not with ``--maxfail``, ``-x`` and ``--pdb``, which need the first failure at once."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._held: list[pytest.TestReport] = []  # of one test: of its call and its teardown
        self._holds = True
        self._rerun_s: float | None = None  # set if the rerun has passed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # "???" is xdist's report of a worker that crashed: a rerun could crash this process too.
        if not self._holds or not report.failed or report.when not in ("setup", "call", "teardown"):
            return
        if self._held and self._held[0].nodeid != report.nodeid:
            self._report_held()
        else:
            self._held.append(report)
            report.outcome = HELD  # type: ignore[assignment]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        return ("", "R", ("FAILED, RERUN LATER", {"yellow": True})) if report.outcome == HELD else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            result = yield
            if self._held:
                self._rerun(session)
        finally:  # Ctrl-C too
            self._report_held()
        return result

    def _rerun(self, session: pytest.Session) -> None:
        self._holds = False
        for item in self._find_item(session):
            failures, began = session.testsfailed, time.monotonic()
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if session.testsfailed == failures:
                self._rerun_s = time.monotonic() - began
            else:
                self._held = []  # the rerun has reported it

    def _find_item(self, session: pytest.Session) -> list[pytest.Item]:
        """Find the item of the failed test; xdist's controller has to collect it first."""
        nodeid = self._held[0].nodeid
        found: list[object] = list(getattr(session, "items", ()))
        if not found:
            collected = session.testscollected
            with suppress(pytest.UsageError):
                found = [*session.perform_collect([f"{self._config.rootpath}/{nodeid}"])]
            session.testscollected = collected
        return [each for each in found if isinstance(each, pytest.Item) and each.nodeid == nodeid]

    def _report_held(self) -> None:
        """Report the held failures, unless the rerun has passed, and hold no others."""
        self._holds = False
        if self._rerun_s is None:
            held, self._held = self._held, []
            for report in held:
                report.outcome = "failed"
                self._config.hook.pytest_runtest_logreport(report=report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._rerun_s is None:
            return
        first = self._held[0]
        terminalreporter.write_sep("_", f"{first.nodeid} failed first", yellow=True)
        for report in self._held:
            report.toterminal(terminalreporter._tw)
        crash = getattr(first.longrepr, "reprcrash", None)
        error = (crash.message if crash else first.longreprtext).partition("\n")[0]
        times = f"failed after {sum(each.duration for each in self._held):.1f} s, passed alone in {self._rerun_s:.1f} s"
        terminalreporter.write_line(f"rerun: {first.nodeid} ({times}): {error[:200]}", yellow=True)
        terminalreporter._add_stats("rerun", [first])


def pytest_configure(config: pytest.Config) -> None:
    at_once = config.option.maxfail or config.option.usepdb or config.option.collectonly
    if not hasattr(config, "workerinput") and not at_once:
        config.pluginmanager.register(RerunFailure(config), "rerun-failure")
