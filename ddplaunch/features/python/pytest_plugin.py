"""The pytest plugin: ``@pytest.mark.ranks(4)`` runs a test's body in four ranks.

Until such a test runs, only pytest is imported.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ddplaunch.features.python.rank.rank_value import RankValue

if TYPE_CHECKING:
    from ddplaunch.features.python.pytest_ranks import PytestRanks

_RANKS: pytest.StashKey[PytestRanks] = pytest.StashKey()

_NOT_IN_RANKS = frozenset(
    {"monkeypatch", "capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys", "caplog", "recwarn", "request"}
)
"""Fixtures that change or capture pytest's own process; ranks are other processes."""


def _rank_value(request: pytest.FixtureRequest, name: str) -> RankValue:
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"the fixture {name} is for tests with @pytest.mark.ranks(N)", pytrace=False)
    return RankValue(name)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> object:
    """The number of the rank that runs the test, from 0."""
    return _rank_value(request, "rank")


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> object:
    """The number of ranks that run the test."""
    return _rank_value(request, "world_size")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> object:
    """The ``torch.device`` of the rank that runs the test."""
    return _rank_value(request, "device")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    what = "run the test in n ranks; keywords are those of ddplaunch.launch, and fresh=True, timeout=SECONDS"
    config.addinivalue_line("markers", f"ranks(n, **keywords): {what}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a marked test whose body cannot run in ranks."""
    marker = item.get_closest_marker("ranks")
    if marker is not None and (why := _why_unsupported(item, marker)):
        pytest.fail(why, pytrace=False)


def _why_unsupported(item: pytest.Item, marker: pytest.Mark) -> str | None:
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        return "@pytest.mark.ranks does not work with unittest.TestCase: use a plain class or a function"
    if len(marker.args) != 1 or "nproc" in marker.kwargs:
        return "@pytest.mark.ranks takes the number of ranks and keywords: @pytest.mark.ranks(4)"
    if inspect.iscoroutinefunction(item.obj):
        return "@pytest.mark.ranks does not await tests: call asyncio.run in the test"
    if unsupported := sorted(_NOT_IN_RANKS & set(item._fixtureinfo.argnames)):
        return f"the fixture {unsupported[0]} does not work in a ranks test: it acts on pytest's own process"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test in ranks."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    if pyfuncitem.config.getoption("trace", False):
        pytest.exit("--trace does not work with @pytest.mark.ranks: write breakpoint() in the test", 4)
    from ddplaunch.features.python import pytest_ranks

    if _RANKS not in pyfuncitem.config.stash:
        pyfuncitem.config.stash[_RANKS] = pytest_ranks.PytestRanks(pyfuncitem.config)
    ranks = pyfuncitem.config.stash[_RANKS]
    fails = pyfuncitem.get_closest_marker("xfail") is not None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    expected = partial(_is_expected, pyfuncitem)
    ranks.run_test(pyfuncitem.obj, given, *marker.args, fails=fails, is_expected=expected, **marker.kwargs)
    return True


def _is_expected(item: pytest.Function, error: BaseException) -> bool:
    """Whether ``error`` is an exception that an ``xfail(raises=…)`` marker of the test names.

    The condition of the marker is left to pytest: where it is false, the test fails with ``error``.
    """
    return any(_matches(marker.kwargs.get("raises"), error) for marker in item.iter_markers("xfail"))


def _matches(raises: object, error: BaseException) -> bool:
    if isinstance(raises, (type, tuple)):
        return isinstance(error, raises)
    matches: Callable[[BaseException], bool] = getattr(raises, "matches", lambda error: False)
    return matches(error)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks at the end of the test session."""
    if ranks := config.stash.get(_RANKS, None):
        ranks.close()
