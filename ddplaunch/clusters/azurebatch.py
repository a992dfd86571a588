"""Azure Batch: a multi-instance task, whose command runs on its primary node alone, or a subtask on another.

The variables are those of learn.microsoft.com/azure/batch/batch-compute-node-environment-variables. Those of an mpirun
that its command starts are read before.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import batch_script, is_set
from ddplaunch.errors import UsageError

HOSTS = "AZ_BATCH_HOST_LIST"  # 10.0.0.4,10.0.0.5
IS_PRIMARY = "AZ_BATCH_IS_CURRENT_NODE_MASTER"  # true, false
JOB_ID = "AZ_BATCH_JOB_ID"  # batchjob001


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise the task's command.

    Raises UsageError in a subtask of several.
    """
    given = allocation(environ)
    if given is None:
        return None
    if len(given.hosts) > 1 and environ.get(IS_PRIMARY) == "false":
        raise UsageError(
            f"{IS_PRIMARY}=false: this is a subtask of one on {len(given.hosts)} hosts ({HOSTS}={environ[HOSTS]})",
            f"ddplaunch run --nnodes {len(given.hosts)} --node-rank I --master-addr {given.hosts[0]} … on every host\n"
            "or --cluster none …, for this machine alone",
        )
    return batch_script("azurebatch", (HOSTS, IS_PRIMARY), given, "mpirun with one process per host")


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the task's hosts."""
    if not is_set(environ, HOSTS, JOB_ID):
        return None
    return Allocation(environ[JOB_ID], tuple(environ[HOSTS].split(",")), HOSTS)
