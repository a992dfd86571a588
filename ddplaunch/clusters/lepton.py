"""DGX Cloud Lepton of NVIDIA: a worker of a batch job.

The variables are those of docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars. Its pods are those
of an indexed Job, whose names and subdomain make an address: env-job-98bw-0.env-job-98bw-job-svc.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import check_below, is_set, job_port, number_if_set, numbers, unaddressed

NNODES = "LEPTON_JOB_TOTAL_WORKERS"  # 2
NODE_RANK = "LEPTON_JOB_WORKER_INDEX"  # 1
PREFIX = "LEPTON_JOB_SERVICE_PREFIX"  # env-job-98bw
SUBDOMAIN = "LEPTON_SUBDOMAIN"  # env-job-98bw-job-svc
GPUS = "LEPTON_RESOURCE_ACCELERATOR_NUM"  # 8
JOB = "LEPTON_JOB_NAME"  # env-job-98bw


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a worker of a job.

    Raises UsageError if there are several and the variables do not say where the first is.
    """
    if not is_set(environ, NNODES):
        return None
    nnodes, node_rank = numbers(environ, NNODES, NODE_RANK)
    check_below(node_rank, nnodes, NODE_RANK, NNODES)
    told = is_set(environ, PREFIX, SUBDOMAIN)
    if nnodes > 1 and not told:
        raise unaddressed(environ, NNODES, NODE_RANK)
    gpus, job = number_if_set(environ, GPUS), environ.get(JOB) or None
    return Finding(
        "lepton",
        (NNODES, NODE_RANK, *([PREFIX, SUBDOMAIN] if told else [])),
        nnodes=nnodes,
        node_rank=node_rank,
        address=f"{environ[PREFIX]}-0.{environ[SUBDOMAIN]}" if told else None,
        address_comes_late=True,
        port=job_port(job) if job else None,
        run_id=job,
        nproc=str(gpus) if gpus else None,
    )
