"""Azure Machine Learning."""

from __future__ import annotations

from ddplaunch.clusters.azureml import find
from ddplaunch.clusters.finding import Place
from tests.clusters.samples import openmpi

JOB = {"AZUREML_EXPERIMENT_ID": "6f1c1a3e", "AZUREML_RUN_ID": "loving_drum_4kwx1yvh2m", "AZUREML_NODE_COUNT": "2"}

# a PyTorch distribution with one process an instance
NODE = {
    **JOB,
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "NODE_RANK": "1",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
}


def test_mpi_with_the_address_that_azure_tells() -> None:
    finding = find({**JOB, **openmpi(3, 4, 1, 2), "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"})
    assert finding
    assert finding.place == Place(3, 4, 1, 2)
    assert (finding.cluster, finding.address) == ("azureml", "10.0.0.4")
    assert "AZ_BATCH_MASTER_NODE" in finding.variables


def test_mpi_on_one_host() -> None:
    finding = find({**JOB, **openmpi(1, 2, 1, 2), "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"})
    assert finding
    assert (finding.nnodes, finding.address) == (1, "10.0.0.4")


def test_one_process_a_node_is_a_node() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (2, 1, None)
    assert (finding.address, finding.port, finding.run_id) == ("10.0.0.4", 6105, "loving_drum_4kwx1yvh2m")


def test_several_processes_a_node_are_torchs_to_tell() -> None:
    assert find({**NODE, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}) is None


def test_a_job_of_no_distribution() -> None:
    assert find(JOB) is None
    assert find({**NODE, "AZUREML_EXPERIMENT_ID": ""}) is None
