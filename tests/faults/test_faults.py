"""Every row of the matrix, with and without a restart, held against the contract; loaded machines get more time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.matrix import ROWS
from tests.faults.table import line
from tests.faults.trial import ALLOWANCE, Trial
from tests.hosts.network import Network

MATRIX = [
    pytest.param(row, restarts, id=f"{row.name}, --max-restarts {restarts}", marks=[pytest.mark.slow] * row.slow)
    for row in ROWS
    for restarts in (0, 1)
]


@pytest.mark.parametrize(("row", "restarts"), MATRIX)
def test_row(row: object, restarts: int, network: Callable[..., Network], tmp_path: Path) -> None:
    result = Trial(row, restarts, "ddplaunch", network(2), tmp_path).play()  # type: ignore[arg-type]
    print(line(result))
    said = "\n".join(f"launcher {number} said:\n{seen.stderr}" for number, seen in enumerate(result.seen))
    assert result.complaints(ALLOWANCE) == [], said
