"""MPICH's and Intel MPI's Hydra."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.mpich import find
from ddplaunch.errors import UsageError

# mpirun -np 5 -ppn 3 of Intel MPI on two hosts, rank 4
TASK = {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}


def test_a_rank_of_several_hosts() -> None:
    finding = find(TASK)
    assert finding
    assert finding.place == Place(rank=4, world_size=5, local_rank=1, local_world_size=2)
    assert (finding.nnodes, finding.node_rank, finding.port, finding.run_id) == (None, None, None, None)


def test_intel_tells_jobs_apart() -> None:
    one, other = (find({**TASK, "I_MPI_HYDRA_UUID": f"06000000-8ac7-aeff-ce60-{end}"}) for end in ("0600", "0601"))
    assert one
    assert other
    assert one.run_id == "06000000-8ac7-aeff-ce60-0600"
    assert one.port != other.port


def test_one_process_a_host_is_a_node() -> None:
    finding = find({**TASK, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (5, 4, None)


def test_pmi_alone_is_not_hydra() -> None:
    """``srun --mpi=pmi2`` and Flux set it too, and tell no local rank by it."""
    assert find({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"}) is None


def test_pmix_must_agree() -> None:
    assert find({**TASK, "PMIX_RANK": "4"}) == find(TASK)
    with pytest.raises(UsageError, match="PMI_RANK=4 and PMIX_RANK=1 contradict each other"):
        find({**TASK, "PMIX_RANK": "1"})


def test_the_pmix_of_a_slurm_step_is_its_daemons() -> None:
    assert find({**TASK, "PMIX_RANK": "1", "SLURM_STEP_ID": "0"}) == find(TASK)


@pytest.mark.parametrize("name", sorted(set(TASK) - {"PMI_FD"}))
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=1x is not a number"):
        find({**TASK, name: "1x"})
