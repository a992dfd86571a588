"""Grid Engine (SGE, UGE, Altair): a job's script on its first host, and the hosts of its parallel environment.

Grid Engine does not number the processes that a script starts on other hosts, by ``qrsh -inherit``; the script of
``ddplaunch submit`` does. It gives the file of hosts to the job's script alone.
``man sge_pe``: a line of PE_HOSTFILE is host, slots, queue and processors: "n1 4 all.q@n1 UNDEFINED".
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters import submitted
from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import batch_script, is_set, read_hosts
from ddplaunch.errors import UsageError

JOB_ID = "JOB_ID"  # 4711
TASK_ID = "SGE_TASK_ID"  # 2 in an array, else undefined
HOSTFILE = "PE_HOSTFILE"  # /opt/sge/default/spool/n1/active_jobs/4711.1/pe_hostfile
SCRIPT = "JOB_SCRIPT"  # a path, or QRSH
ENVIRONMENT = "PE"  # mpi


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job of ``ddplaunch submit``, or a job's script.

    Raises UsageError if qrsh has started this process on another host of a job.
    """
    if ours := submitted.find("sge", environ, JOB_ID, TASK_ID):
        return ours
    given = allocation(environ)
    if is_set(environ, JOB_ID, ENVIRONMENT) and environ.get(SCRIPT) == "QRSH" and not (given and given.hosts):
        raise UsageError(
            f"{SCRIPT}=QRSH: qrsh has started this on a host of sge job {environ[JOB_ID]}, and nothing numbers it",
            "on every host: ddplaunch run --nnodes N --node-rank I --master-addr HOST …\n"
            "this machine alone: ddplaunch run --standalone …, or --cluster none",
        )
    return batch_script("sge", (JOB_ID, HOSTFILE), given, "mpirun with one process per host") if given else None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the hosts of the job's parallel environment."""
    if not is_set(environ, JOB_ID, HOSTFILE):
        return None
    return Allocation(environ[JOB_ID], read_hosts(environ[HOSTFILE]), HOSTFILE)
