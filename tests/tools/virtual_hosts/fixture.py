"""The fixture for tests with several virtual hosts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.tools.virtual_hosts.network import Network, unsupported


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Make networks of virtual hosts, as ``network(2)``, for one test; skip the test if the machine cannot have any."""
    if reason := unsupported():
        pytest.skip(f"NO VIRTUAL HOSTS HERE: {reason}")
    with ExitStack() as stack:

        def make(count: int, **options: Any) -> Network:
            return stack.enter_context(Network(count, **options))

        yield make
