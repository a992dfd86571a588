"""The parallel universe of HTCondor."""

from __future__ import annotations

from ddplaunch.clusters.htcondor import find
from tests.conftest import write

NODE = {"_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "2", "_CONDOR_SCRATCH_DIR": "/var/lib/condor/execute/dir_4711"}
TOLD = {**NODE, "MASTER_ADDR": "n1"}


def test_one_node() -> None:
    finding = find({"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "1"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (1, 0, None)


def test_a_node_whose_script_says_where_the_first_is() -> None:
    finding = find(TOLD)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address) == (2, 1, "n1")


def test_any_other_job() -> None:
    assert find({"_CONDOR_SCRATCH_DIR": "/var/lib/condor/execute/dir_4711", "_CONDOR_SLOT": "slot1_1"}) is None


def test_without_an_address_it_says_what_to_type(answer, tmp_path) -> None:
    write(tmp_path, "train.py", "")
    done = answer("run", "--dry-run", "train.py", env=NODE)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Error: _CONDOR_PROCNO=1 of _CONDOR_NPROCS=2 nodes, but nothing says where node 0 is",
        '  ddplaunch run --nnodes "$_CONDOR_NPROCS" --node-rank "$_CONDOR_PROCNO" --master-addr … on every node',
        "  or --cluster none …, for this machine alone",
    ]
    typed = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "n1")
    assert "node rank: 1 (--node-rank)" in answer("run", "--dry-run", *typed, "train.py", env=NODE).stdout
