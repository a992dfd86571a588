"""Amazon SageMaker: a host of a training job, told by the variables of its training toolkit."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF, contradiction, is_set, number_if_set, text
from ddplaunch.errors import UsageError

HOSTS = "SM_HOSTS"  # ["algo-1","algo-2"]
HOST = "SM_CURRENT_HOST"  # algo-2
GPUS = "SM_NUM_GPUS"  # 8
JOB = "TRAINING_JOB_NAME"  # pytorch-training-2024-05-01-12-00-00-000


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a host of a training job.

    Raises UsageError if SM_HOSTS is not a JSON list of names, or lacks this host.
    """
    if not is_set(environ, HOSTS):
        return None
    hosts, host = _hosts(environ[HOSTS]), text(environ, HOST)
    if host not in hosts:
        raise contradiction(f"{HOSTS}={environ[HOSTS]}", f"{HOST}={host}")
    gpus = number_if_set(environ, GPUS)
    return Finding(
        "sagemaker",
        (HOSTS, HOST),
        nnodes=len(hosts),
        node_rank=hosts.index(host),
        address=hosts[0],
        run_id=environ.get(JOB) or None,
        nproc=str(gpus) if gpus else None,
    )


def _hosts(listed: str) -> list[str]:
    import json

    try:
        hosts = json.loads(listed)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise UsageError(f"{HOSTS}={listed} is not a JSON list of hosts", OFF)
    return hosts
