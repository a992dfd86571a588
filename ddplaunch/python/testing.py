"""The ranks that pytest keeps for its tests."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from ddplaunch.errors import LaunchError
from ddplaunch.python import body
from ddplaunch.python.attached import Attached, LookedAt
from ddplaunch.python.job import RankFailed
from ddplaunch.python.session import Session


class Ranks:
    """The ranks of a test session: those of one kind stay until a test of another kind comes, or one fails."""

    def __init__(self, config: pytest.Config) -> None:
        self._attached = Attached(config)
        self._kind: object = None
        self._session: Session | None = None

    def test(
        self,
        function: Callable[..., object],
        given: dict[str, object],
        n: int,
        *,
        fails: bool = False,
        fresh: bool = False,
        timeout: float | None = None,
        **keywords: Any,
    ) -> None:
        """Run a test's body in ``n`` ranks.

        ``fails``: it is expected to.

        Raises what pytest reports as failed or skipped, with the traceback of the rank that failed first.
        """
        if self._attached.possible:
            keywords = {"debug": True, "post_mortem": self._attached.post_mortem and not fails, **keywords}
        if self._attached.post_mortem:
            timeout = None  # a person takes the time
        kind = (n, sorted(keywords.items()))
        if fresh or kind != self._kind or self._session is None:
            self.close()
            self._kind, self._session = kind, Session(nproc=n, **keywords)
            self._session.heard = self._attached.hear
        module = inspect.getmodule(function)
        try:
            if module is not None:
                cloudpickle.register_pickle_by_value(module)  # with its assertions as pytest has rewritten them
            try:
                self._attached.begin()
                found = self._session.run(body.run, function, given, timeout=timeout)
            except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
                told = f"{_unfit({**given, function.__name__: function})}{error}"
                raise pytest.fail.Exception(told, pytrace=False) from None
            finally:
                self._attached.end()
                if module is not None:
                    cloudpickle.unregister_pickle_by_value(module)
        except LaunchError as error:
            self.close()
            told = error.report if isinstance(error, RankFailed) else "\n  ".join(filter(None, error.args))
            failure: Any = LookedAt if self._attached.post_mortem else pytest.fail.Exception
            raise failure(told, pytrace=False) from None
        skips = [reason for reason, _ in found if reason is not None]
        leaks = {leak: rank for rank, (_, left) in enumerate(found) for leak in left}
        if leaks or fresh:
            self.close()
        for leak, rank in leaks.items():
            warnings.warn(pytest.PytestWarning(f"rank {rank} {leak}; the next test gets new ranks"), stacklevel=1)
        if skips:
            pytest.skip(skips[0])

    def close(self) -> None:
        """End the ranks, if there are any."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _unfit(values: dict[str, object]) -> str:
    """Which of these cannot travel, if one cannot."""
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name} cannot be sent to the ranks: "
    return ""
