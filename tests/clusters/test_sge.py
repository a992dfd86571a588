"""Grid Engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.clusters.sge import find
from ddplaunch.errors import UsageError


def test_a_script_is_no_node_of_the_job(tmp_path: Path) -> None:
    hostfile = tmp_path / "pe_hostfile"
    hostfile.write_text("n1 4 all.q@n1 UNDEFINED\nn2 4 all.q@n2 UNDEFINED\n")
    finding = find({"JOB_ID": "4711", "PE_HOSTFILE": str(hostfile), "NHOSTS": "2", "NSLOTS": "8"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (1, 0, None)
    assert "one of its 2 hosts" in finding.notes[0]
    hostfile.write_text("n1 4 all.q@n1 UNDEFINED\n")
    alone = find({"JOB_ID": "4711", "PE_HOSTFILE": str(hostfile)})
    assert alone
    assert alone.notes == ()


def test_a_node_of_a_job_of_ours() -> None:
    job = {"JOB_ID": "4711", "PE_HOSTFILE": "/proc/nowhere", "DDPLAUNCH_HOSTS": "n1,n2"}
    first, second = (find({**job, "DDPLAUNCH_NODE_RANK": rank}) for rank in "01")
    assert first
    assert second
    assert (second.nnodes, second.node_rank, second.address, second.place) == (2, 1, "n1", None)
    assert (first.node_rank, first.port, first.run_id) == (0, second.port, "4711")
    assert not first.is_script
    with pytest.raises(UsageError, match="DDPLAUNCH_NODE_RANK=2 and hosts in DDPLAUNCH_HOSTS=2 contradict"):
        find({**job, "DDPLAUNCH_NODE_RANK": "2"})


def test_one_of_an_array_has_a_name_and_a_port_of_its_own() -> None:
    job = {"JOB_ID": "4711", "DDPLAUNCH_HOSTS": "n1,n2", "DDPLAUNCH_NODE_RANK": "1"}
    alone, second, third = (find({**job, "SGE_TASK_ID": index}) for index in ("undefined", "2", "3"))
    assert alone
    assert second
    assert third
    assert (alone.run_id, second.run_id, third.run_id) == ("4711", "4711_2", "4711_3")
    assert second.port != third.port


def test_what_qrsh_has_started_on_another_host_is_refused() -> None:
    """The variables that a real one has there, without -V."""
    task = {"JOB_ID": "1", "JOB_NAME": "petask", "JOB_SCRIPT": "QRSH", "NHOSTS": "1", "NSLOTS": "1", "PE": "spread"}
    with pytest.raises(UsageError, match="JOB_SCRIPT=QRSH: qrsh has started this on a host of sge job 1"):
        find(task)
    assert find({**task, "PE": ""}) is None, "qrsh in a terminal, on one host"


def test_nothing_without_it() -> None:
    assert find({"JOB_ID": "4711", "SGE_ROOT": "/opt/sge"}) is None
