"""PBS (OpenPBS, PBS Professional, Torque): a job's script on its first host, or what ``pbsdsh`` started on a host.

Neither numbers processes; what PBS tells of others is the list of hosts in PBS_NODEFILE, one line a slot. Its own
``mpiexec`` sets the variables of its MPI, which are read before.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters import submitted
from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import batch_script, check_below, is_set, job_port, number_if_set, read_hosts

JOB_ID = "PBS_JOBID"  # 1234.server, 1234[7].server for one of an array
INDEX = "PBS_ARRAY_INDEX"  # 7, in an array
NODEFILE = "PBS_NODEFILE"  # /var/spool/pbs/aux/1234.server
NODE_RANK = "PBS_NODENUM"  # 1, which of the job's hosts this is
TASK = "PBS_TASKNUM"  # 1 is the job's script


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job of ``ddplaunch submit``, a job's script, or a process that pbsdsh has started.

    Raises UsageError if PBS_NODENUM is not a number, or more than there are hosts.
    """
    if ours := submitted.find("pbs", environ, JOB_ID, INDEX):
        return ours
    given = allocation(environ)
    if given is None:
        return None
    node_rank, task = number_if_set(environ, NODE_RANK), number_if_set(environ, TASK)
    if not given.hosts or node_rank is None or (node_rank == 0 and task in (None, 1)):
        return batch_script("pbs", (JOB_ID, NODEFILE), given, "mpiexec with one process per host, or pbsdsh")
    count = len(given.hosts)
    check_below(node_rank, count, NODE_RANK, f"hosts in {NODEFILE}")
    return Finding(
        "pbs",
        (JOB_ID, NODE_RANK, NODEFILE),
        nnodes=count,
        node_rank=node_rank,
        address=given.hosts[0],
        port=job_port(given.job),
        run_id=given.job,
    )


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job's hosts, as far as the file is on this one."""
    if not is_set(environ, JOB_ID, NODEFILE):
        return None
    return Allocation(environ[JOB_ID], read_hosts(environ[NODEFILE]), NODEFILE)
