"""LSF with and without jsrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.lsf import find
from ddplaunch.errors import UsageError


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The batch script on a launch node, with two hosts of three slots."""
    rankfile = tmp_path / "rankfile"
    rankfile.write_text("batch2\n" + "h41n03\n" * 3 + "h41n04\n" * 3)
    return {"LSB_JOBID": "4711", "LSB_DJOB_RANKFILE": str(rankfile), "CSM_ALLOCATION_ID": "17"}


def task(rank: int, size: int, local_rank: int, **others: str) -> dict[str, str]:
    return {
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": str(size),
        "JSM_NAMESPACE_LOCAL_RANK": str(local_rank),
        **others,
    }


def test_the_first_line_of_the_rankfile_is_the_launch_node(job: dict[str, str]) -> None:
    finding = find({**job, **task(4, 6, 1)})
    assert finding
    assert finding.address == "h41n03"
    assert finding.place == Place(rank=4, world_size=6, local_rank=1, local_world_size=None)
    assert (finding.nnodes, finding.node_rank, finding.run_id) == (None, None, "4711")


def test_one_process_a_host_is_a_node(job: dict[str, str]) -> None:
    finding = find({**job, **task(1, 2, 0, JSM_NAMESPACE_LOCAL_SIZE="1")})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (2, 1, None)


def test_what_blaunch_has_started_is_a_node(tmp_path: Path) -> None:
    """It numbers tasks, not hosts: which host this is says more."""
    rankfile, own = tmp_path / "rankfile", os.uname().nodename
    rankfile.write_text(f"h1\nh1\n{own}\n{own}\n")
    job = {"LSB_JOBID": "4711", "LSB_DJOB_RANKFILE": str(rankfile), "LSF_PM_TASKID": "3"}
    finding = find(job)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.run_id) == (2, 1, "h1", "4711")
    assert finding.port
    rankfile.write_text("h1\nh2\n")
    elsewhere = find(job)
    assert elsewhere
    assert elsewhere.is_script


def test_two_processes_may_share_the_first_of_two_hosts(job: dict[str, str]) -> None:
    finding = find({**job, **task(1, 2, 1)})
    assert finding
    assert finding.place == Place(1, 2, 1, None)


def test_a_script_is_no_node_of_the_job(job: dict[str, str]) -> None:
    finding = find(job)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (1, 0, None)
    assert "one of its 2 hosts; to use all: jsrun" in finding.notes[0]


def test_without_launch_nodes_every_host_counts(job: dict[str, str]) -> None:
    del job["CSM_ALLOCATION_ID"]
    finding = find(job)
    assert finding
    assert "one of its 3 hosts" in finding.notes[0]


def test_a_rankfile_that_is_not_there(job: dict[str, str]) -> None:
    finding = find({**job, **task(4, 6, 1), "LSB_DJOB_RANKFILE": "/proc/nowhere"})
    assert finding
    assert finding.address is None


def test_a_variable_that_is_no_number_is_named(job: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="JSM_NAMESPACE_RANK=x is not a number"):
        find({**job, **task(4, 6, 1), "JSM_NAMESPACE_RANK": "x"})


def test_nothing_without_it() -> None:
    assert find({"LSF_ENVDIR": "/opt/lsf/conf"}) is None
