"""OpenPAI: a task of a job.

The variables are those of openpai.readthedocs.io, "How to use advanced job settings", "Environmental variables". An
index counts within a task role.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import check_below, is_set, job_port, number, text
from ddplaunch.errors import UsageError

ROLES = "PAI_TASK_ROLE_LIST"  # worker; or ps,worker
ROLE = "PAI_CURRENT_TASK_ROLE_NAME"  # worker
INDEX = "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"  # 1
JOB = "PAI_JOB_NAME"  # admin~train
COUNT_OF, HOST_OF = "PAI_TASK_ROLE_TASK_COUNT_", "PAI_HOST_IP_"  # PAI_TASK_ROLE_TASK_COUNT_worker, PAI_HOST_IP_worker_0


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a task.

    Raises UsageError if the job has several task roles, of which nothing says whether they are one job of ranks.
    """
    if not is_set(environ, ROLE, INDEX):
        return None
    role, index = environ[ROLE], number(environ, INDEX)
    count_name, host_name = f"{COUNT_OF}{role}", f"{HOST_OF}{role}_0"
    count = number(environ, count_name)
    roles = environ.get(ROLES, role).split(",")
    if len(roles) > 1:
        raise UsageError(
            f"{INDEX}={index} counts within {role}, but the job has {len(roles)} task roles: {', '.join(roles)}",
            "ddplaunch run --nnodes N --node-rank I --master-addr HOST … on every node\n"
            "or --cluster none …, for this machine alone",
        )
    check_below(index, count, INDEX, count_name)
    job = environ.get(JOB) or None
    return Finding(
        "openpai",
        (INDEX, count_name, *([host_name] if count > 1 else [])),
        nnodes=count,
        node_rank=index,
        address=text(environ, host_name) if count > 1 else None,
        port=job_port(job) if job else None,
        run_id=job,
    )
