"""Tests each row of the fault matrix, with and without a restart where that matters."""

import pytest

from tests.scaled_timeouts import scaled_timeout
from tests.tools.faults.matrix import ROWS
from tests.tools.faults.trial import ALLOWANCE, Trial

pytestmark = [pytest.mark.ci, pytest.mark.slow]

MATRIX = [
    pytest.param(row, restarts, id=f"{row.name}, --max-restarts {restarts}")
    for row in ROWS
    for restarts in row.restarts_that_matter
]


@pytest.mark.parametrize(("row", "restarts"), MATRIX)
def test_a_fault_has_the_documented_outcome(row, restarts, network, tmp_path):
    result = Trial(row, restarts, "ddplaunch", network(2), tmp_path).run()  # type: ignore[arg-type]
    print(result.render_row())
    output = "\n".join(
        f"stderr of launcher {number}:\n{outcome.stderr}" for number, outcome in enumerate(result.outcomes)
    )
    assert result.list_errors(scaled_timeout(ALLOWANCE)) == [], output
