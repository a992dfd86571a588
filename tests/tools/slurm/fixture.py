"""Fixtures for tests with a real Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.tools.slurm.cluster import Slurm, unsupported
from tests.tools.virtual_hosts.network import Network


@pytest.fixture
def slurm(network: Callable[..., Network], tmp_path: Path) -> Iterator[Callable[..., Slurm]]:
    """Make clusters with so many compute nodes, as ``slurm(2, gpus=4)``, which end with the test; or skip."""
    with ExitStack() as stack:

        def make(nodes: int = 2, *, gpus: int = 0, **options: Any) -> Slurm:
            if reason := unsupported(gpus=gpus):
                pytest.skip(f"NO SLURM HERE: {reason}")
            cluster = Slurm(network(nodes + 1), tmp_path, gpus=gpus, **options)
            return stack.enter_context(cluster)

        yield make


@pytest.fixture(scope="session")
def _standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := unsupported():
        pytest.skip(f"NO SLURM HERE: {reason}")
    with Network(3) as network, Slurm(network, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def standing_slurm(_standing: Slurm, tmp_path: Path) -> Iterator[Slurm]:
    """A cluster of two compute nodes, idle, that tests use one after the other: for those that change no daemon."""
    _standing.folder = tmp_path
    yield _standing
    _standing.run("scancel", "--me", check=False)
    _standing.wait_until_idle()
