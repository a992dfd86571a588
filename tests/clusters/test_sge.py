"""Grid Engine."""

from __future__ import annotations

from pathlib import Path

from ddplaunch.clusters.sge import find


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


def test_nothing_without_it() -> None:
    assert find({"JOB_ID": "4711", "SGE_ROOT": "/opt/sge"}) is None
