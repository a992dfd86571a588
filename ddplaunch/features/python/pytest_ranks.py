"""The ranks of a pytest session: starts them for marked tests, and runs the tests' bodies in them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from ddplaunch.base.errors import LaunchError
from ddplaunch.features.python import pickle_files
from ddplaunch.features.python.launched_job import RankFailed
from ddplaunch.features.python.pytest_debugger import ExaminedInDebugger, PytestDebugger
from ddplaunch.features.python.rank import pytest_body
from ddplaunch.features.python.rank.call_loop import CALL_OR_END, CALL_QUIETLY
from ddplaunch.features.python.session import Session


class PytestRanks:
    """The ranks of a test session; until a test fails, the next test with equal marker arguments uses them again."""

    def __init__(self, config: pytest.Config) -> None:
        self._debugger = PytestDebugger(config)
        self._kind: object = None  # number of ranks and keywords of the current session
        self._session: Session | None = None

    def run_test(
        self,
        function: Callable[..., object],
        given: dict[str, object],
        n: int,
        *,
        fails: bool = False,
        is_expected: Callable[[BaseException], bool] = lambda error: False,
        fresh: bool = False,
        timeout: float | None = None,
        **keywords: Any,
    ) -> None:
        """Run a test's body in ``n`` ranks.

        ``fails``: the test is expected to fail. ``is_expected``: whether an exception is the one that it must raise.

        Raises pytest's exceptions for a failed or skipped test, with the traceback of the rank that failed first;
        raises an expected exception unchanged.
        """
        if self._debugger.is_available:
            keywords = {"debug": True, "post_mortem": self._debugger.post_mortem and not fails, **keywords}
        if self._debugger.post_mortem:
            timeout = None  # the user is debugging
        kind = (n, sorted(keywords.items()))
        if fresh or kind != self._kind or self._session is None:
            self.close()
            self._kind, self._session = kind, Session(nproc=n, **keywords)
            self._session.on_note = self._debugger.on_note
            self._session.request = CALL_OR_END if self._debugger.post_mortem else CALL_QUIETLY
        try:
            results = self._run(function, given, timeout)
        except RankFailed as error:
            self.close()
            if error.__cause__ is not None and is_expected(error.__cause__):
                raise error.__cause__ from None
            failure: Any = ExaminedInDebugger if self._debugger.post_mortem else pytest.fail.Exception
            raise failure(_text(error), pytrace=False) from None
        except (LaunchError, TypeError) as error:  # TypeError: a keyword of the marker is not an option
            self.close()
            lines = filter(None, (str(error), getattr(error, "hint", None)))
            raise pytest.fail.Exception("\n  ".join(lines), pytrace=False) from None
        except pytest.fail.Exception as error:  # from pytest-timeout: the stack of this process is of no interest
            self.close()
            raise pytest.fail.Exception(error.msg, pytrace=False) from None
        except BaseException:
            self.close()
            raise
        leaks = {leak: rank for rank, (_, changes) in enumerate(results) for leak in changes}
        if leaks or fresh:
            self.close()
        for leak, rank in leaks.items():
            warnings.warn(pytest.PytestWarning(f"rank {rank} {leak}; the next test gets new ranks"), stacklevel=1)
        for outcome, reason in (each for each, _ in results if each is not None):
            (pytest.skip if outcome == "skip" else pytest.xfail)(reason)

    def _run(
        self, function: Callable[..., object], given: dict[str, object], timeout: float | None
    ) -> list[pytest_body.Result]:
        """Run the body in the ranks; raises LaunchError with the name of a fixture that cannot be pickled."""
        assert self._session is not None
        module = inspect.getmodule(function)
        if module is not None:
            cloudpickle.register_pickle_by_value(module)  # keeps the assertions rewritten by pytest
        try:
            self._debugger.start_test()
            return self._session.run(pytest_body.run_body, function, given, _warning_filters(), timeout=timeout)
        except pickle_files.UnpicklableError as error:
            raise pickle_files.make_unpicklable_error({**given, function.__name__: function}, error) from None
        finally:
            self._debugger.finish_test()
            if module is not None:
                cloudpickle.unregister_pickle_by_value(module)

    def close(self) -> None:
        """End the ranks, if there are any."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _warning_filters() -> list[Any]:
    """This test's warning filters, "default" for pytest's "always": a rank would print a warning at each call."""
    return [("default" if action == "always" else action, *rest) for action, *rest in warnings.filters]


def _text(error: RankFailed) -> str:
    """The failure report, starting with the rank's exception, for pytest's one-line summary."""
    first, newline, rest = error.report.removeprefix("ddplaunch: ").partition("\n")
    raised = first.removeprefix(f"rank {error.rank} failed with ")
    return f"{raised} (rank {error.rank}){newline}{rest}" if raised != first else error.report
