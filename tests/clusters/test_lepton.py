"""DGX Cloud Lepton."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.lepton import find
from ddplaunch.errors import UsageError

NODE = {
    "LEPTON_JOB_NAME": "env-job-98bw",
    "LEPTON_JOB_SERVICE_PREFIX": "env-job-98bw",
    "LEPTON_JOB_WORKER_PREFIX": "worker",
    "LEPTON_SUBDOMAIN": "env-job-98bw-job-svc",
    "LEPTON_JOB_TOTAL_WORKERS": "2",
    "LEPTON_JOB_WORKER_INDEX": "1",
    "LEPTON_RESOURCE_ACCELERATOR_NUM": "8",
}


def test_a_worker() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.nproc, finding.place) == (2, 1, "8", None)
    assert (finding.address, finding.address_comes_late) == ("env-job-98bw-0.env-job-98bw-job-svc", True)
    assert finding.port
    assert finding.run_id == "env-job-98bw"


def test_one_worker_needs_no_address() -> None:
    alone = {"LEPTON_JOB_TOTAL_WORKERS": "1", "LEPTON_JOB_WORKER_INDEX": "0", "LEPTON_SUBDOMAIN": ""}
    finding = find({**NODE, **alone, "LEPTON_RESOURCE_ACCELERATOR_NUM": "0"})
    assert finding
    assert (finding.nnodes, finding.address, finding.nproc) == (1, None, None)


@pytest.mark.parametrize("name", ["LEPTON_JOB_SERVICE_PREFIX", "LEPTON_SUBDOMAIN"])
def test_without_an_address_it_says_what_to_type(name: str) -> None:
    with pytest.raises(
        UsageError, match="of LEPTON_JOB_TOTAL_WORKERS=2 nodes, but nothing says where node 0"
    ) as raised:
        find({**NODE, name: ""})
    assert '--node-rank "$LEPTON_JOB_WORKER_INDEX" --master-addr …' in str(raised.value.hint)


def test_an_index_out_of_range() -> None:
    with pytest.raises(UsageError, match="LEPTON_JOB_WORKER_INDEX=2 and LEPTON_JOB_TOTAL_WORKERS=2 contradict"):
        find({**NODE, "LEPTON_JOB_WORKER_INDEX": "2"})
