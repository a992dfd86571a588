"""Azure Machine Learning: a job with its MPI distribution, or with its PyTorch distribution of one process a node.

With several processes a node its PyTorch distribution sets all of torch's variables, and those are read as such. With
one it sets the same, and means a node: the documented way is to start torchrun there with NODE_RANK.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters import openmpi
from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import counts_nodes, is_set, number, number_if_set
from ddplaunch.dataclass import replace

EXPERIMENT = "AZUREML_EXPERIMENT_ID"  # 6f1c1a3e-2f6b-4a7e-9d5f-0d9d3a0c8f51
RUN_ID = "AZUREML_RUN_ID"  # loving_drum_4kwx1yvh2m
NNODES = "AZUREML_NODE_COUNT"  # 2
MPI_ADDRESSES = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")  # 10.0.0.4:6000; on one node an address alone

NODE_RANK = "NODE_RANK"  # 1
SIZE = "WORLD_SIZE"  # 2: nodes, or processes where there are several a node
ADDRESS = "MASTER_ADDR"  # 10.0.0.4
PORT = "MASTER_PORT"  # 6105


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that Azure's mpirun has started, or a node of a PyTorch job."""
    if not is_set(environ, EXPERIMENT):
        return None
    run_id = environ.get(RUN_ID) or None
    if finding := openmpi.find(environ):
        name = next((name for name in MPI_ADDRESSES if is_set(environ, name)), None)
        return replace(
            finding,
            cluster="azureml",
            variables=(*finding.variables, *([name] if name else [])),
            address=environ[name].partition(":")[0] if name else finding.address,
            run_id=run_id or finding.run_id,
        )
    if not is_set(environ, NODE_RANK, SIZE, ADDRESS) or number(environ, SIZE) != number_if_set(environ, NNODES):
        return None
    return counts_nodes("azureml", environ, NNODES, NODE_RANK, ADDRESS, PORT, run_id=run_id)
