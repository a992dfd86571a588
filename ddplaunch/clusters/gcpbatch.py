"""Batch of Google Cloud: a task of a job, one of many jobs unless its job asks for a file of the hosts.

The variables are those of cloud.google.com/batch/docs/reference/rest/v1/projects.locations.jobs: ``taskCount``,
``requireHostsFile``. No variable says on which host a task is, so hosts are numbered by their place in the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddplaunch.clusters.finding import Finding
from ddplaunch.clusters.reading import OFF, a_copy, contradiction, is_set, number, own_place, read_hosts
from ddplaunch.errors import UsageError

INDEX = "BATCH_TASK_INDEX"  # 1
COUNT = "BATCH_TASK_COUNT"  # 2
HOSTS = "BATCH_HOSTS_FILE"  # /mnt/disks/batch/hosts; a name a line


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a task.

    Raises UsageError if the job has a file of hosts, and not one task on each, or this machine is not in it.
    """
    if not is_set(environ, INDEX, COUNT):
        return None
    count, hosts = number(environ, COUNT), read_hosts(environ[HOSTS]) if is_set(environ, HOSTS) else ()
    if count == 1:
        return Finding("gcpbatch", (INDEX, COUNT), nnodes=1, node_rank=0)
    if not hosts:
        return a_copy("gcpbatch", environ, INDEX, HOSTS, "task")
    if count != len(hosts):
        raise contradiction(f"{COUNT}={count}", f"{HOSTS}={environ[HOSTS]} (hosts: {len(hosts)})")
    place = own_place(hosts)
    if place is None:
        raise UsageError(f"{HOSTS}={environ[HOSTS]} does not have this machine, {os.uname().nodename}", OFF)
    return Finding("gcpbatch", (COUNT, HOSTS), nnodes=count, node_rank=place, address=hosts[0])
