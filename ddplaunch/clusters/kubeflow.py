"""Kubeflow: a pod of a TrainJob (PET_*, as torchrun's options) or of a PyTorchJob (RANK; PET_* in newer ones).

A PyTorchJob's RANK is the pod's index, not a process's, and WORLD_SIZE counts pods or processes, by version. That no
process is meant shows in the missing LOCAL_RANK.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF, counts_nodes, is_set, number, to_number
from ddplaunch.errors import UsageError

NNODES = "PET_NNODES"  # 2, or 1:3 where the job is elastic
NPROC = "PET_NPROC_PER_NODE"  # 8, auto, gpu, cpu
PET_NODE_RANK = "PET_NODE_RANK"  # 1
PET_ADDRESS = "PET_MASTER_ADDR"  # trainjob-node-0-0.trainjob
PET_PORT = "PET_MASTER_PORT"  # 29500
RUN_ID = "PET_RDZV_ID"  # my-job

POD = "RANK"  # 1
PODS = "WORLD_SIZE"  # 2
ADDRESS = "MASTER_ADDR"  # job-master-0
PORT = "MASTER_PORT"  # 23456
LOCAL_RANK = "LOCAL_RANK"  # never
IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # 10.96.0.1, in every pod


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a pod of a job."""
    if is_set(environ, NNODES):
        lowest, colon, highest = environ[NNODES].partition(":")
        if colon and lowest != highest:
            raise UsageError(f"{NNODES}={environ[NNODES]}: the pods of an elastic job do not know their node rank", OFF)
        nnodes, count_name = to_number(lowest, NNODES), NNODES
        pod = PET_NODE_RANK if is_set(environ, PET_NODE_RANK) else POD
        address = PET_ADDRESS if is_set(environ, PET_ADDRESS) else ADDRESS
        port = PET_PORT if is_set(environ, PET_PORT) else PORT
    elif is_set(environ, IN_KUBERNETES, POD, PODS, ADDRESS) and not is_set(environ, LOCAL_RANK):
        nnodes, count_name = number(environ, PODS), PODS
        pod, address, port = POD, ADDRESS, PORT
    else:
        return None
    return counts_nodes(
        "kubeflow",
        environ,
        count_name,
        pod,
        address,
        port,
        count=nnodes,
        nproc=NPROC,
        run_id=environ.get(RUN_ID) or None,
        comes_late=True,
    )
