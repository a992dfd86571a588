"""Volcano: a pod of a job with its env and svc plugins.

The variables are those of github.com/volcano-sh/volcano: docs/user-guide/how_to_use_env_plugin.md, and, for the hosts,
pkg/controllers/job/plugins/svc. An index counts within a task, and no variable says which task the pod is of. Pods that
its pytorch plugin numbers look like those of a PyTorchJob, and are read as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import a_copy, agreed, check_below, contradiction, is_set, number_if_set
from ddplaunch.errors import UsageError

INDEXES = ("VC_TASK_INDEX", "VK_TASK_INDEX")  # 1; older versions have the latter alone
HOSTS = re.compile(r"VC_([A-Z0-9_]+)_HOSTS")  # VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job, for every task


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a pod of a job of one task; without the svc plugin it is one of many jobs.

    Raises UsageError if the job has several tasks.
    """
    index_name = next((name for name in INDEXES if is_set(environ, name)), None)
    if index_name is None:
        return None
    tasks = {name: environ[name].split(",") for name in sorted(environ) if HOSTS.fullmatch(name) and environ[name]}
    index = agreed(environ, *INDEXES)
    if not tasks:
        return a_copy("volcano", environ, index_name, "VC_…_HOSTS of the svc plugin", "pod")
    if len(tasks) > 1:
        raise _several(index_name, index, tasks)
    ((name, hosts),) = tasks.items()
    count_name = name.removesuffix("HOSTS") + "NUM"
    if number_if_set(environ, count_name) not in (None, len(hosts)):
        raise contradiction(f"{count_name}={environ[count_name]}", f"{name}={environ[name]} (nodes: {len(hosts)})")
    check_below(index, len(hosts), index_name, f"hosts in {name}")
    return Finding(
        "volcano",
        (index_name, name),
        nnodes=len(hosts),
        node_rank=index,
        address=hosts[0],
        address_comes_late=True,
    )


def _several(index_name: str, index: int, tasks: Mapping[str, list[str]]) -> UsageError:
    nnodes, first = sum(map(len, tasks.values())), next(iter(tasks.values()))[0]
    return UsageError(
        f"{index_name}={index} counts within one task, but the job has {len(tasks)}: {', '.join(tasks)}",
        f"ddplaunch run --nnodes {nnodes} --node-rank … --master-addr {first} …, or Volcano's pytorch plugin\n"
        "or --cluster none …, for this pod alone",
    )
