"""Samples and figures over ranks: webdataset and torchdata see each once, torchmetrics counts each once."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.frameworks.launchers import PATIENCE, PROGRAMS, Launchers, reports, requires

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Six tar files with four numbered samples each, as webdataset names them all."""
    for shard in range(6):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as file:
            for number in range(4 * shard, 4 * shard + 4):
                member = tarfile.TarInfo(f"{number:03}.cls")
                member.size = len(str(number))
                file.addfile(member, io.BytesIO(str(number).encode()))
    return f"{tmp_path}/{{0..5}}.tar"


@requires("webdataset", "torchdata")
def test_each_sample_is_seen_by_one_rank(launchers: Launchers, shards: str) -> None:
    for workers in ("0", "2"):
        first, second = reports(launchers.ddplaunch(PROGRAMS / "loaders.py", "--", shards, workers))
        assert sorted(first["webdataset"] + second["webdataset"]) == list(range(24))
        assert len(first["webdataset"]) == len(second["webdataset"]) == 12
        assert sorted(first["torchdata"] + second["torchdata"]) == list(range(20))
    assert [first, second] == reports(launchers.torchrun(PROGRAMS / "loaders.py", shards, "2"))


@requires("torchmetrics")
def test_metrics_over_ranks_are_those_of_one_process(launchers: Launchers) -> None:
    ours = reports(launchers.ddplaunch("--preload", "torch,torchmetrics", f"{PROGRAMS / 'metrics.py'}:main"))
    alone = reports(launchers.python(PROGRAMS / "metrics.py"))[0]
    assert [(report.pop("rank"), report.pop("world_size")) for report in [*ours, alone]] == [(0, 2), (1, 2), (0, 1)]
    assert ours == [alone, alone]
    assert len(alone["seen"]) == 50
