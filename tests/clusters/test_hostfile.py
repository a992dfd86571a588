"""Batch systems that give a script a file of its hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.clusters import find
from ddplaunch.clusters.hostfile import ROWS
from tests.clusters.samples import openmpi


@pytest.mark.parametrize("name", ROWS)
def test_a_script_is_told_of_its_hosts(name: str, tmp_path: Path) -> None:
    row, file = ROWS[name], tmp_path / "hosts"
    file.write_text("n1\nn1\nn2\nn2\n")
    job = {row.job_id: "4711", row.file: str(file)}
    finding = find(job)
    assert finding
    assert (finding.cluster, finding.nnodes, finding.node_rank, finding.is_script) == (name, 1, 0, True)
    said = f"the script of {name} job 4711 runs on one of its 2 hosts; to use all: mpirun with one process per host"
    assert finding.notes == (said,)
    file.write_text("n1\nn1\n")
    alone = find(job)
    assert alone
    assert alone.notes == ()


@pytest.mark.parametrize("name", ROWS)
def test_mpirun_takes_address_and_port_from_it(name: str, tmp_path: Path) -> None:
    row, file = ROWS[name], tmp_path / "hosts"
    file.write_text("n1\nn2\n")
    finding = find({row.job_id: "4711", row.file: str(file), **openmpi(3, 4, 1, 2)})
    assert finding
    assert (finding.cluster, finding.address) == ("openmpi", "n1")
    assert finding.port
    assert row.file in finding.variables
