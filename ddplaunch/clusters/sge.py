"""Grid Engine (SGE, UGE, Altair): a job's script on its first host, and the hosts of its parallel environment.

Grid Engine does not number the processes that a script starts on other hosts; the script of ``ddplaunch submit`` does.
``man sge_pe``: a line of PE_HOSTFILE is host, slots, queue and processors: "n1 4 all.q@n1 UNDEFINED".
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.clusters.finding import Allocation, Finding
from ddplaunch.clusters.reading import batch_script, check_below, is_set, job_port, number, read_hosts

JOB_ID = "JOB_ID"  # 4711
HOSTFILE = "PE_HOSTFILE"  # /opt/sge/default/spool/n1/active_jobs/4711.1/pe_hostfile
HOSTS = "DDPLAUNCH_HOSTS"  # n1,n2; each once, node 0's first
NODE_RANK = "DDPLAUNCH_NODE_RANK"  # 1


def find(environ: Mapping[str, str]) -> Finding | None:
    """Recognise a node of a job of ``ddplaunch submit``, or a job's script."""
    if is_set(environ, JOB_ID, HOSTS, NODE_RANK):
        hosts, job = environ[HOSTS].split(","), environ[JOB_ID]
        node_rank = number(environ, NODE_RANK)
        check_below(node_rank, len(hosts), NODE_RANK, f"hosts in {HOSTS}")
        variables = (JOB_ID, HOSTS, NODE_RANK)
        return Finding("sge", variables, len(hosts), node_rank, address=hosts[0], port=job_port(job), run_id=job)
    given = allocation(environ)
    return batch_script("sge", (JOB_ID, HOSTFILE), given, "mpirun with one process per host") if given else None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the hosts of the job's parallel environment."""
    if not is_set(environ, JOB_ID, HOSTFILE):
        return None
    return Allocation(environ[JOB_ID], read_hosts(environ[HOSTFILE]), HOSTFILE)
