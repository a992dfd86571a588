"""HPE's PALS."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.pals import find
from ddplaunch.errors import UsageError

TASK = {
    "PALS_APID": "6f1c1a3e-2f6b-4a7e-9d5f-0d9d3a0c8f51",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}


def test_a_rank() -> None:
    finding = find(TASK)
    assert finding
    assert finding.place == Place(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert (finding.node_rank, finding.run_id) == (1, TASK["PALS_APID"])
    assert finding.port


def test_one_process_a_node_is_a_node() -> None:
    finding = find({**TASK, "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1", "PALS_NODEID": "3"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (4, 3, None)


def test_a_local_size_that_is_not_told() -> None:
    finding = find({name: value for name, value in TASK.items() if name != "PALS_LOCAL_SIZE"})
    assert finding
    assert finding.place == Place(3, 4, 1, None)


@pytest.mark.parametrize("name", ["PMI_RANK", "PMIX_RANK"])
def test_all_ranks_must_agree(name: str) -> None:
    with pytest.raises(UsageError, match=f"PALS_RANKID=3 and {name}=2 contradict each other"):
        find({**TASK, name: "2"})


def test_srun_on_a_cray_is_left_to_slurm() -> None:
    """``srun --mpi=cray_shasta`` sets PALS's variables beside Slurm's, which know the hosts."""
    assert find({**TASK, "SLURM_STEP_ID": "0"}) is None
