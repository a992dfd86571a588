"""Scales the time limit of each test, which only prevents endless hangs, by the slowness of the machine."""

from collections.abc import Generator

import pytest

from tests.scaled_timeouts import scaled_timeout

_QUIET = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout reads the mark, in a wrapper too
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if _QUIET not in item.stash:
        mark = item.get_closest_marker("timeout")
        item.stash[_QUIET] = float(mark.args[0] if mark else item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(scaled_timeout(item.stash[_QUIET])), append=False)
    return (yield)
