"""Tests in ranks, both sides: the ranks that pytest keeps, and what runs in each of them."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle
import pytest

from ddplaunch import runtime
from ddplaunch.errors import LaunchError
from ddplaunch.plan.rendezvous import free_port
from ddplaunch.python.failed import RankFailed
from ddplaunch.python.plugin import InRank
from ddplaunch.python.session import Session


class Ranks:
    """The ranks of a test session: those of one kind stay until a test of another kind comes, or one fails."""

    def __init__(self) -> None:
        self._kind: object = None
        self._session: Session | None = None

    def test(
        self,
        function: Callable[..., object],
        given: dict[str, object],
        n: int,
        *,
        fresh: bool = False,
        timeout: float | None = None,
        **keywords: Any,
    ) -> None:
        """Run a test's body in ``n`` ranks.

        Raises what pytest reports as failed or skipped, with the traceback of the rank that failed first.
        """
        kind = (n, sorted(keywords.items()))
        if fresh or kind != self._kind or self._session is None:
            self.close()
            self._kind, self._session = kind, Session(nproc=n, **keywords)
        module = inspect.getmodule(function)
        try:
            if module is not None:
                cloudpickle.register_pickle_by_value(module)  # with its assertions as pytest has rewritten them
            try:
                found = self._session.run(_in_rank, function, given, free_port(), timeout=timeout)
            finally:
                if module is not None:
                    cloudpickle.unregister_pickle_by_value(module)
        except RankFailed as error:
            self.close()
            pytest.fail(error.report, pytrace=False)
        except LaunchError as error:
            self.close()
            pytest.fail("\n  ".join(filter(None, (error.message, error.hint))), pytrace=False)
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


def _in_rank(function: Callable[..., object], given: dict[str, object], port: int) -> tuple[str | None, list[str]]:
    """Run the body here; return why it was skipped, and what it left that the next test would find."""
    os.environ["MASTER_PORT"] = str(port)  # a store that is empty: a test may make a process group of its own
    own = {"rank": runtime.rank, "world_size": runtime.world_size, "device": runtime.device}
    arguments = {name: own[value.name]() if isinstance(value, InRank) else value for name, value in given.items()}
    before, skipped = _state(), None
    try:
        function(**arguments)
    except pytest.skip.Exception as error:
        skipped = str(error.msg)
    return skipped, [words for words, value in _state().items() if value != before[words]]


def _state() -> dict[str, object]:
    """What tests share in a process, by what is to be said of a change."""
    torch = sys.modules.get("torch")
    found: dict[str, object] = {
        "leaves other variables": dict(os.environ),
        "leaves another working folder": os.getcwd(),
        "leaves another default dtype": None,
        "leaves a process group open, or closed one that it had": False,
    }
    if torch is not None:
        found["leaves another default dtype"] = str(torch.get_default_dtype())
        with suppress(AttributeError):
            found["leaves a process group open, or closed one that it had"] = torch.distributed.is_initialized()
    return found
