"""Fixtures for tests with an sshd."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.features.ssh.sshd import Sshd, unsupported
from tests.tools.virtual_hosts.network import Network


@pytest.fixture
def sshd(network: Callable[..., Network], tmp_path: Path) -> Callable[..., Sshd]:
    """Make networks of hosts with an sshd each, as ``sshd(2)``, which end with the test; or skip."""

    def make(count: int, **options: Any) -> Sshd:
        if reason := unsupported():
            pytest.skip(f"NO SSHD HERE: {reason}")
        return Sshd(network(count, **options), tmp_path / "ssh")

    return make
