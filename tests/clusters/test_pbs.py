"""PBS and Torque."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.clusters.pbs import find
from ddplaunch.errors import UsageError


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The script of a job on two hosts with two slots each."""
    nodefile = tmp_path / "1234.server"
    nodefile.write_text("n1.example.org\nn1.example.org\nn2.example.org\nn2.example.org\n")
    return {
        "PBS_JOBID": "1234.server",
        "PBS_NODEFILE": str(nodefile),
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "1",
        "PBS_ENVIRONMENT": "PBS_BATCH",
    }


def test_a_script_is_no_node_of_the_job(job: dict[str, str]) -> None:
    finding = find(job)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address) == (1, 0, None)
    assert "job 1234.server runs on one of its 2 hosts" in finding.notes[0]


def test_what_pbsdsh_started_is_a_node(job: dict[str, str]) -> None:
    for node, task in ("0", "2"), ("1", "1"):
        finding = find({**job, "PBS_NODENUM": node, "PBS_TASKNUM": task})
        assert finding
        assert (finding.nnodes, finding.node_rank, finding.address) == (2, int(node), "n1.example.org")
        assert finding.port


def test_a_list_that_is_not_on_this_host_tells_nothing(job: dict[str, str]) -> None:
    finding = find({**job, "PBS_NODEFILE": "/proc/nowhere", "PBS_NODENUM": "1"})
    assert finding
    assert (finding.nnodes, finding.notes) == (1, ())


@pytest.mark.parametrize(("odd", "why"), [("fifo", "not a regular file"), ("/dev/zero", "not a regular file")])
def test_a_list_that_is_none(job: dict[str, str], tmp_path: Path, odd: str, why: str) -> None:
    """Reading a FIFO would wait for ever, and a device never end."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=f"{odd} cannot be read as a file of hosts: {why}"):
        find({**job, "PBS_NODEFILE": str(tmp_path / odd)})


def test_a_list_of_a_terabyte(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    with pytest.raises(UsageError, match="huge cannot be read as a file of hosts: more than 16777216 bytes"):
        find({**job, "PBS_NODEFILE": str(tmp_path / "huge")})


def test_more_nodes_than_hosts(job: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="PBS_NODENUM=2 and hosts in PBS_NODEFILE=2 contradict"):
        find({**job, "PBS_NODENUM": "2"})


def test_nothing_without_it() -> None:
    assert find({"PBS_CONF_FILE": "/etc/pbs.conf"}) is None


def test_a_node_of_a_job_of_ours() -> None:
    job = {"PBS_JOBID": "1234.server", "PBS_NODENUM": "7", "DDPLAUNCH_HOSTS": "n1,n2", "DDPLAUNCH_NODE_RANK": "1"}
    finding = find(job)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.is_script) == (2, 1, "n1", False)
    assert finding.run_id == "1234.server"


def test_one_of_an_array() -> None:
    ours = {"DDPLAUNCH_HOSTS": "n1,n2", "DDPLAUNCH_NODE_RANK": "1"}
    node = find({"PBS_JOBID": "4711[0].pbs01", "PBS_ARRAY_INDEX": "0", **ours})
    assert node
    assert node.run_id == "4711_0.pbs01"
