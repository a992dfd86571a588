"""The cluster that each test has for itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.cluster import User, unsupported


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    if reason := unsupported():
        pytest.skip(f"NO KUBECTL HERE: {reason}")
    server = ApiServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def user(server: ApiServer, tmp_path: Path, run_in_fork: Launch) -> Iterator[User]:
    user = User(server, tmp_path, run_in_fork)
    yield user
    user.close()
