"""Batch systems that give a script a file of its hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.clusters import find
from ddplaunch.clusters.hostfile import ROWS
from ddplaunch.errors import UsageError
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


def test_a_process_on_another_host_than_the_scripts_is_refused(tmp_path: Path) -> None:
    """Something has started it there, by ssh or the like, and maybe on all of them."""
    file, own = tmp_path / "hosts", os.uname().nodename
    file.write_text(f"n1.cluster\n{own}.cluster\n")
    with pytest.raises(UsageError) as raised:
        find({"OAR_JOB_ID": "4711", "OAR_NODEFILE": str(file)})
    said = f"the script of oar job 4711 runs on n1.cluster, and this is {own}.cluster: it may be one of 2 nodes"
    assert raised.value.message == said
    assert "--nnodes 2 --node-rank 1 --master-addr n1.cluster" in str(raised.value.hint)
    file.write_text(f"{own}\nn2\n")
    first = find({"OAR_JOB_ID": "4711", "OAR_NODEFILE": str(file)})
    assert first
    assert first.is_script


@pytest.mark.parametrize("name", ROWS)
def test_mpirun_takes_address_and_port_from_it(name: str, tmp_path: Path) -> None:
    row, file = ROWS[name], tmp_path / "hosts"
    file.write_text("n1\nn2\n")
    finding = find({row.job_id: "4711", row.file: str(file), **openmpi(3, 4, 1, 2)})
    assert finding
    assert (finding.cluster, finding.address) == ("openmpi", "n1")
    assert finding.port
    assert row.file in finding.variables
