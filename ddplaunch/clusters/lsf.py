"""LSF: ``jsrun``, which sets JSM_NAMESPACE_*, ``blaunch``, a node of a job of ``ddplaunch submit``, or a job's script.

On systems with jsrun the script runs on a launch node, which is the first line of the job's rank file and has no
process of the job; on others the first line is a host like the rest. blaunch numbers its tasks (PRRTE's ess/lsf reads
LSF_PM_TASKID too), of which a host may have several, so that a host's own place tells which node it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters import submitted
from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import (
    batch_script,
    is_set,
    job_port,
    number_if_set,
    numbers,
    own_place,
    read_hosts,
    started,
    to_number,
)

JOB_ID = "LSB_JOBID"  # 4711
INDEX = "LSB_JOBINDEX"  # 7 in an array, else 0
RANKFILE = "LSB_DJOB_RANKFILE"  # /home/me/.lsbatch/1700000000.4711.hostfile: one host a line, once for every slot
TASK = "LSF_PM_TASKID"  # 1, from 1; of blaunch
CSM_ID = "CSM_ALLOCATION_ID"  # 17, where the system has launch nodes

RANK = "JSM_NAMESPACE_RANK"  # 3
SIZE = "JSM_NAMESPACE_SIZE"  # 4
LOCAL_RANK = "JSM_NAMESPACE_LOCAL_RANK"  # 1
LOCAL_SIZE = "JSM_NAMESPACE_LOCAL_SIZE"  # 2


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a process that jsrun has started, a node of a job of ``ddplaunch submit``, or a job's script."""
    given = allocation(environ)
    if not is_set(environ, RANK):
        if ours := submitted.find("lsf", environ, JOB_ID, INDEX):
            return ours
        if given and is_set(environ, TASK) and (place := own_place(given.hosts)) is not None:
            port, names = job_port(given.job), (JOB_ID, TASK, RANKFILE)
            return Finding("lsf", names, len(given.hosts), place, address=given.hosts[0], port=port, run_id=given.job)
        return batch_script("lsf", (JOB_ID, RANKFILE), given, "jsrun or blaunch") if given else None
    hosts = given.hosts if given else ()
    return started(
        "lsf",
        (RANK, SIZE, LOCAL_RANK, RANKFILE),
        *numbers(environ, RANK, SIZE, LOCAL_RANK),
        local_size=number_if_set(environ, LOCAL_SIZE),
        most_nodes=len(hosts) or None,
        address=hosts[0] if hosts else None,
        job=to_number(given.job, JOB_ID) if given else None,
    )


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job's hosts without the launch node."""
    if not is_set(environ, JOB_ID, RANKFILE):
        return None
    hosts = read_hosts(environ[RANKFILE])
    has_launch_node = is_set(environ, CSM_ID) or is_set(environ, RANK)
    return Allocation(environ[JOB_ID], hosts[1:] if has_launch_node else hosts, RANKFILE)
