"""The machine learning platform of Volcengine and BytePlus: a node of a custom task.

The variables are those of volcengine.com/docs/6459/75329, in English
docs.byteplus.com/en/docs/mlp/List_of_common_environment_variables. A role's index counts within the role, so only
workers are nodes of a job.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF, counts_nodes, is_set
from ddplaunch.errors import UsageError

NNODES = "MLP_WORKER_NUM"  # 2
ROLE = "MLP_ROLE"  # WORKER; or SERVER, SCHEDULER, CHIEF, PS, EVALUATOR
NODE_RANK = "MLP_ROLE_INDEX"  # 1
ADDRESS = "MLP_WORKER_0_HOST"  # 10.128.97.74
PORT = "MLP_WORKER_0_PORT"  # 9006
GPUS = "MLP_WORKER_GPU"  # 8, of each worker
TASK = "MLP_TASK_ID"  # t-20210924211641-nznsh

WORKER = "WORKER"


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a worker.

    Raises UsageError on a machine of another role.
    """
    if not is_set(environ, NNODES):
        return None
    if environ.get(ROLE, WORKER).upper() != WORKER:
        what = f"{ROLE}={environ[ROLE]}: this machine is not one of the workers that {NNODES}={environ[NNODES]} counts"
        raise UsageError(what, f"start ddplaunch on the workers alone; {OFF}")
    run_id = environ.get(TASK) or None
    return counts_nodes("volcengine", environ, NNODES, NODE_RANK, ADDRESS, PORT, nproc=GPUS, run_id=run_id)
