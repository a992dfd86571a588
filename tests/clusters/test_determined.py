"""Determined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddplaunch.clusters import determined
from ddplaunch.errors import UsageError

TRIAL = {"DET_ALLOCATION_ID": "1.6f1c1a3e.1", "DET_TASK_TYPE": "TRIAL"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(determined, "FILE", str(tmp_path / "rendezvous.json"))
    return tmp_path / "rendezvous.json"


def test_a_container_of_a_trial(file: Path) -> None:
    file.write_text(
        json.dumps({"container_addrs": ["10.0.0.4", "10.0.0.5"], "container_rank": 1, "container_slot_counts": [8, 8]})
    )
    finding = determined.find(TRIAL)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.run_id) == (2, 1, "10.0.0.4", "1.6f1c1a3e.1")


@pytest.mark.parametrize("text", ["", "[]", '{"container_rank": 0}', '{"container_addrs": ["a"], "container_rank": 1}'])
def test_what_cannot_be(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(
        UsageError, match=r"does not say which container this is|container_rank=1 and container_addrs=1"
    ):
        determined.find(TRIAL)


def test_other_tasks_have_no_such_file(file: Path) -> None:
    assert determined.find(TRIAL) is None
