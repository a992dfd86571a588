"""Runs failed tests once more, alone, after all others: if they pass then, the run passes, and shows the reruns.

A run in which more than ``MAX_RERUNS`` tests fail has failed, and repeats none. The plugin belongs to the process that
reports: pytest's own, or xdist's controller after its last worker.
"""

import time
from collections.abc import Generator
from contextlib import suppress

import pytest

MAX_RERUNS = 2

HELD = "held"
"""The outcome of a failure that is reported only after the rerun."""


class RerunFailures:
    """The plugin; ``--maxfail``, ``-x`` and ``--pdb`` want the first failure at once, and do without it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._held: dict[str, list[pytest.TestReport]] = {}  # by test: its call may fail, and its teardown
        self._holds = True
        self._reruns: dict[str, float] = {}  # seconds of those that have passed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # "???" is xdist's report of a worker that died: what did that to a worker might do it to us.
        if not self._holds or not report.failed or report.when not in ("setup", "call", "teardown"):
            return
        if report.nodeid not in self._held and len(self._held) == MAX_RERUNS:
            self._report_held()
        else:
            self._held.setdefault(report.nodeid, []).append(report)
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
            if self._holds:
                self._rerun(session)
        finally:  # Ctrl-C too
            self._report_held()
        return result

    def _rerun(self, session: pytest.Session) -> None:
        self._holds = False
        items = self._find_items(session) if self._held else []
        for item, following in zip(items, [*items[1:], None], strict=False):
            failures, began = session.testsfailed, time.monotonic()
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed == failures:
                self._reruns[item.nodeid] = time.monotonic() - began
            else:
                del self._held[item.nodeid]  # the rerun has reported it

    def _find_items(self, session: pytest.Session) -> list[pytest.Item]:
        """Return the items of the failed tests; xdist's controller, which has collected none, collects them at once."""
        found: list[object] = list(getattr(session, "items", ()))
        if not found:
            collected = session.testscollected
            with suppress(pytest.UsageError):
                found = [*session.perform_collect([f"{self._config.rootpath}/{nodeid}" for nodeid in self._held])]
            session.testscollected = collected
        return [each for each in found if isinstance(each, pytest.Item) and each.nodeid in self._held]

    def _report_held(self) -> None:
        """Report what is held, and has not passed since, as failed; nothing is rerun any more."""
        self._holds = False
        for nodeid in [nodeid for nodeid in self._held if nodeid not in self._reruns]:
            for report in self._held.pop(nodeid):
                report.outcome = "failed"
                self._config.hook.pytest_runtest_logreport(report=report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, seconds in self._reruns.items():
            first = self._held[nodeid][0]
            terminalreporter.write_sep("_", f"{nodeid} failed first", yellow=True)
            for report in self._held[nodeid]:
                report.toterminal(terminalreporter._tw)
            crash = getattr(first.longrepr, "reprcrash", None)
            error = (crash.message if crash else first.longreprtext).partition("\n")[0]
            failed_s = sum(each.duration for each in self._held[nodeid])
            times = f"failed after {failed_s:.1f} s, passed alone in {seconds:.1f} s"
            terminalreporter.write_line(f"rerun: {nodeid} ({times}): {error[:200]}", yellow=True)
            terminalreporter._add_stats("rerun", [first])


def pytest_configure(config: pytest.Config) -> None:
    at_once = config.option.maxfail or config.option.usepdb or config.option.collectonly
    if not hasattr(config, "workerinput") and not at_once:
        config.pluginmanager.register(RerunFailures(config), "rerun-failures")
