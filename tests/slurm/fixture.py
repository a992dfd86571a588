"""What tests with a Slurm ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.network import Network
from tests.slurm.cluster import Slurm, unsupported


@pytest.fixture
def slurm(network: Callable[..., Network], tmp_path: Path) -> Iterator[Callable[..., Slurm]]:
    """Make clusters with so many compute nodes, as ``slurm(2, gpus=4)``, which end with the test; or skip."""
    with ExitStack() as stack:

        def make(nodes: int = 2, *, gpus: int = 0, accounting: bool = False, **options: Any) -> Slurm:
            if reason := unsupported(gpus=gpus, accounting=accounting):
                pytest.skip(f"NO SLURM HERE: {reason}")
            cluster = Slurm(network(nodes + 1), tmp_path, gpus=gpus, accounting=accounting, **options)
            return stack.enter_context(cluster)

        yield make
