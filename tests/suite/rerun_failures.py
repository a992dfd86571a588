"""Runs a failed test once more, alone, after all others: one that passes then is flaky, and is named.

It runs in the process that reports: pytest's own, or xdist's controller after its last worker.
"""

import time
from collections.abc import Generator
from itertools import chain

import pytest

MAX_FLAKY = 5
"""More than these fail the run: that many accidents are none."""

MAX_AGAIN = 10
"""Where more failed than these, something is broken, and running them again would only take time."""

HELD = "held"
"""The outcome of a failure that is reported only after its second run."""


class RerunFailures:
    """The plugin; ``--maxfail``, ``-x`` and ``--pdb`` want the first failure at once, and do without it."""

    def __init__(self) -> None:
        self._held: dict[str, list[pytest.TestReport]] = {}
        self._rerunning = False
        self._flaky: dict[str, float] = {}  # seconds of the second run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # "???" is xdist's report of a worker that died: what did that to a worker might do it to us.
        if report.failed and report.when in ("setup", "call", "teardown") and not self._rerunning:
            self._held.setdefault(report.nodeid, []).append(report)
            report.outcome = HELD  # type: ignore[assignment]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        if report.outcome != HELD:
            return None
        return "run again", "R", ("FAILED, WILL RUN AGAIN", {"yellow": True})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        finished = False
        try:
            result = yield
            finished = True
        finally:
            self._rerunning = True
            if finished and len(self._held) <= MAX_AGAIN:
                self._run_again(session, list(self._held))
            else:
                self._report_failures(session, self._held)
        return result

    def _run_again(self, session: pytest.Session, held: list[str]) -> None:
        collected = session.testscollected
        # xdist's controller has collected nothing itself.
        items = {item.nodeid: item for item in session.items} if held and getattr(session, "items", None) else {}
        if held and not items:
            try:
                found = session.perform_collect([f"{session.config.rootpath}/{name}" for name in held])
            except pytest.UsageError:
                found = []
            items = {item.nodeid: item for item in found if isinstance(item, pytest.Item)}
        session.testscollected = collected
        again = [items[name] for name in held if name in items]
        unreported = dict(self._held)
        try:
            for item, following in zip(again, [*again[1:], None], strict=False):
                began, failures = time.monotonic(), session.testsfailed
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                del unreported[item.nodeid]
                if session.testsfailed == failures:
                    self._flaky[item.nodeid] = time.monotonic() - began
        finally:  # Ctrl-C too, which a second run may take too long for
            self._report_failures(session, unreported)
        if len(self._flaky) > MAX_FLAKY:
            session.testsfailed += 1

    def _report_failures(self, session: pytest.Session, held: dict[str, list[pytest.TestReport]]) -> None:
        """Report failures that will not be run again."""
        for report in chain.from_iterable(held.values()):
            report.outcome = "failed"
            session.config.hook.pytest_runtest_logreport(report=report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        for name in self._flaky:
            terminalreporter.write_sep("_", f"{name} failed first", yellow=True)
            for report in self._held[name]:
                report.toterminal(terminalreporter._tw)
        for name, second in self._flaky.items():
            first = sum(report.duration for report in self._held[name])
            write(f"flaky: {name} (failed after {first:.1f} s, passed alone in {second:.1f} s)", yellow=True)
        if len(self._flaky) > MAX_FLAKY:
            write(f"{len(self._flaky)} flaky tests, and {MAX_FLAKY} are the most: the run has failed", red=True)


def pytest_configure(config: pytest.Config) -> None:
    at_once = config.option.maxfail or config.option.usepdb or config.option.collectonly
    if not hasattr(config, "workerinput") and not at_once:
        config.pluginmanager.register(RerunFailures(), "run-again")
