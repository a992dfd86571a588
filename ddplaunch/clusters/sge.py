"""Grid Engine (SGE, UGE, Altair): a job's script on its first host, and the hosts of its parallel environment.

Grid Engine does not number the processes that a script starts on other hosts; the script of ``ddplaunch submit`` does.
``man sge_pe``: a line of PE_HOSTFILE is host, slots, queue and processors: "n1 4 all.q@n1 UNDEFINED".
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters import submitted
from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import batch_script, is_set, read_hosts

JOB_ID = "JOB_ID"  # 4711
HOSTFILE = "PE_HOSTFILE"  # /opt/sge/default/spool/n1/active_jobs/4711.1/pe_hostfile


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job of ``ddplaunch submit``, or a job's script."""
    if ours := submitted.find("sge", environ, JOB_ID):
        return ours
    given = allocation(environ)
    return batch_script("sge", (JOB_ID, HOSTFILE), given, "mpirun with one process per host") if given else None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the hosts of the job's parallel environment."""
    if not is_set(environ, JOB_ID, HOSTFILE):
        return None
    return Allocation(environ[JOB_ID], read_hosts(environ[HOSTFILE]), HOSTFILE)
