"""ModelArts of Huawei Cloud: a node of a training job.

The variables are those of support.huaweicloud.com/intl/en-us/develop-modelarts/develop-modelarts-0104.html, table 2.
VC_* come from Volcano, which runs its jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import agreed, check_below, contradiction, is_set, number, number_if_set, text

NNODES = "MA_NUM_HOSTS"  # 2
WORKERS = "VC_WORKER_NUM"  # 2
NODE_RANK = "VC_TASK_INDEX"  # 1; means nothing where there is one node
HOSTS = "VC_WORKER_HOSTS"  # job-worker-0.job,job-worker-1.job
GPUS = "MA_NUM_GPUS"  # 8; 0 on CPUs


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job."""
    if not is_set(environ, NNODES):
        return None
    nnodes, gpus = agreed(environ, NNODES, WORKERS), number_if_set(environ, GPUS)
    nproc = str(gpus) if gpus else None
    if nnodes == 1:
        return Finding("modelarts", (NNODES,), nnodes=1, node_rank=0, nproc=nproc)
    node_rank, hosts = number(environ, NODE_RANK), text(environ, HOSTS).split(",")
    check_below(node_rank, nnodes, NODE_RANK, NNODES)
    if len(hosts) != nnodes:
        raise contradiction(f"{NNODES}={nnodes}", f"{HOSTS}={environ[HOSTS]} (nodes: {len(hosts)})")
    return Finding(
        "modelarts",
        (NNODES, NODE_RANK, HOSTS),
        nnodes=nnodes,
        node_rank=node_rank,
        address=hosts[0],
        address_comes_late=True,
        nproc=nproc,
    )
