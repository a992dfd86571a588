"""torchrun's variables."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.torchelastic import find
from tests.clusters.samples import TORCHRUN


def test_a_rank() -> None:
    finding = find(TORCHRUN)
    assert finding
    assert (finding.cluster, finding.run_id, finding.place) == ("torchelastic", "my-job", Place(3, 4, 1, 2))
    assert finding.variables[0] == "TORCHELASTIC_RUN_ID"


def test_a_run_without_an_id() -> None:
    finding = find({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert finding
    assert finding.run_id is None


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "MASTER_ADDR"])
def test_an_incomplete_set_is_nothing(name: str) -> None:
    assert find({**TORCHRUN, name: ""}) is None
