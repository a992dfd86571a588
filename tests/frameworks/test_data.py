"""Tests of webdataset, torchdata and torchmetrics: each sample is seen and counted once over all ranks."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, reports, requires

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(3 * TIMEOUT_S)]


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
def test_each_sample_is_seen_by_one_rank(launchers, shards):
    first, second = ours = reports(launchers.ddplaunch(PROGRAMS / "loaders.py", "--", shards))
    for workers in ("0", "2"):
        seen, others = first[workers], second[workers]
        assert sorted(seen["webdataset"] + others["webdataset"]) == list(range(24))
        assert len(seen["webdataset"]) == len(others["webdataset"]) == 12
        assert sorted(seen["torchdata"] + others["torchdata"]) == list(range(20))
    assert ours == reports(launchers.torchrun(PROGRAMS / "loaders.py", shards))


@requires("torchmetrics")
def test_metrics_over_ranks_are_those_of_one_process(launchers):
    ours = reports(launchers.ddplaunch("--preload", "torch,torchmetrics", f"{PROGRAMS / 'metrics.py'}:main"))
    assert [report["rank"] for report in ours] == [0, 1]
    alone = ours[0]["alone"]
    assert [report["alone"] for report in ours] == [report["together"] for report in ours] == [alone, alone]
    assert len(alone["seen"]) == 50
