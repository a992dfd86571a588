"""Batch systems that supply the hosts of a job, but number few of its processes; also jsrun, a part of LSF."""

from __future__ import annotations

import re

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters.cluster_env import (
    Allocation,
    AllocationReader,
    ClusterEnv,
    DetectionPriority,
    RankAssignment,
    register_system,
)
from ddplaunch.system.clusters.env_builders import (
    env_for_batch_script,
    env_for_node,
    env_for_started_ranks,
    own_host_index,
    read_host_file,
)
from ddplaunch.system.clusters.env_variables import EnvVariables, check_below, parse_number

START_HINT = "mpirun with one process per host"

SUBMIT_HOSTS_VARIABLE = "DDPLAUNCH_HOSTS"  # n1,n2; each once, node 0's first
SUBMIT_NODE_RANK_VARIABLE = "DDPLAUNCH_NODE_RANK"  # 1


def detect_submitted_node(cluster: str, environ: EnvVariables, job_id: str, index: str) -> ClusterEnv | None:
    """Detect a job of ``ddplaunch submit``, whose script numbers the hosts; ``job_id`` and ``index`` name it.

    Raises UsageError if the node rank is not a number, or more than there are hosts.
    """
    if not environ.is_set(job_id, SUBMIT_HOSTS_VARIABLE, SUBMIT_NODE_RANK_VARIABLE):
        return None
    hosts, job = environ[SUBMIT_HOSTS_VARIABLE].split(","), re.sub(r"\[\d+\]", "", environ[job_id])
    digits, dot, server = job.partition(".")
    if (which := environ.get(index, "")).isdecimal() and (which != "0" or "[" in environ[job_id]):
        job = f"{digits}_{which}{dot}{server}"
    node_rank = environ.number(SUBMIT_NODE_RANK_VARIABLE)
    check_below(node_rank, len(hosts), SUBMIT_NODE_RANK_VARIABLE, f"hosts in {SUBMIT_HOSTS_VARIABLE}")
    names = (job_id, SUBMIT_HOSTS_VARIABLE, SUBMIT_NODE_RANK_VARIABLE)
    return env_for_node(cluster, names, len(hosts), node_rank, hosts[0], job=job)


JSRUN_RANK, RANKFILE, LSF_JOB = "JSM_NAMESPACE_RANK", "LSB_DJOB_RANKFILE", "LSB_JOBID"


def _lsf_allocation(environ: EnvVariables) -> Allocation | None:
    """Return the job's hosts without the launch node; the rank file has a line with a host's name for each slot."""
    if not environ.is_set(LSF_JOB, RANKFILE):
        return None
    hosts = read_host_file(environ[RANKFILE])
    has_launch_node = environ.is_set("CSM_ALLOCATION_ID") or environ.is_set(JSRUN_RANK)
    return Allocation(environ[LSF_JOB], hosts[1:] if has_launch_node else hosts, RANKFILE)


@register_system(
    "lsf", LSF_JOB, JSRUN_RANK, priority=DetectionPriority.HOSTS, allocation=_lsf_allocation, has_shared_log=True
)
def lsf(environ: EnvVariables) -> ClusterEnv | None:
    """LSF: ``jsrun``, which sets JSM_NAMESPACE_*, ``blaunch``, a node of a job of ``ddplaunch submit``, or a script.

    On systems with jsrun the script runs on a launch node, which is the first line of the job's rank file and has no
    process of the job; on others the first line is a host like the rest. blaunch numbers its tasks from 1 (PRRTE's
    ess/lsf reads LSF_PM_TASKID too). A host may have several tasks, so its place among the hosts is
    the node rank. LSB_JOBINDEX is 0 outside of an array.
    """
    given, task = _lsf_allocation(environ), "LSF_PM_TASKID"
    if environ.is_set(JSRUN_RANK):
        names = (JSRUN_RANK, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK")
        hosts, job = (given.hosts, parse_number(given.job_id, LSF_JOB)) if given else ((), None)
        rank, size, local_rank = environ.numbers(*names)
        process = RankAssignment(rank, size, local_rank, environ.optional_number("JSM_NAMESPACE_LOCAL_SIZE"))
        first, most = hosts[0] if hosts else None, len(hosts) or None
        return env_for_started_ranks("lsf", (*names, RANKFILE), process, max_nodes=most, address=first, job=job)
    if ours := detect_submitted_node("lsf", environ, LSF_JOB, "LSB_JOBINDEX"):
        return ours
    if given and environ.is_set(task) and (place := own_host_index(given.hosts)) is not None:
        names = (LSF_JOB, task, RANKFILE)
        return env_for_node("lsf", names, len(given.hosts), place, given.hosts[0], job=given.job_id)
    return env_for_batch_script("lsf", (LSF_JOB, RANKFILE), given, "jsrun or blaunch") if given else None


def _host_file_reader(job_id: str, file: str) -> AllocationReader:
    """Return a function that reads an allocation and its host file, which has a line for each slot or host."""

    def read_allocation(environ: EnvVariables) -> Allocation | None:
        if not environ.is_set(job_id, file):
            return None
        return Allocation(environ[job_id], read_host_file(environ[file]), file)

    return read_allocation


_of_pbs = _host_file_reader("PBS_JOBID", "PBS_NODEFILE")


@register_system("pbs", "PBS_JOBID", priority=DetectionPriority.HOSTS, allocation=_of_pbs, has_shared_log=True)
def pbs(environ: EnvVariables) -> ClusterEnv | None:
    """PBS (OpenPBS, PBS Professional, Torque): a job's script on its first host, or what ``pbsdsh`` started on a host.

    Neither numbers processes; PBS_NODEFILE lists the hosts, and PBS_NODENUM is the index of this host. PBS_TASKNUM is 1
    in the job's script. PBS_JOBID is 1234.server, or 1234[7].server in an array. PBS's own ``mpiexec`` sets the
    variables of its MPI, which are read before.
    Raises UsageError if PBS_NODENUM is not a number, or more than there are hosts.
    """
    job_id, file, index = "PBS_JOBID", "PBS_NODEFILE", "PBS_NODENUM"
    if ours := detect_submitted_node("pbs", environ, job_id, "PBS_ARRAY_INDEX"):
        return ours
    given = _of_pbs(environ)
    if given is None:
        return None
    node_rank, task = environ.optional_number(index), environ.optional_number("PBS_TASKNUM")
    if not given.hosts or node_rank is None or (node_rank == 0 and task in (None, 1)):
        return env_for_batch_script("pbs", (job_id, file), given, "mpiexec with one process per host, or pbsdsh")
    check_below(node_rank, len(given.hosts), index, f"hosts in {file}")
    return env_for_node("pbs", (job_id, index, file), len(given.hosts), node_rank, given.hosts[0], job=given.job_id)


_of_sge = _host_file_reader("JOB_ID", "PE_HOSTFILE")  # "n1 4 all.q@n1 UNDEFINED": host, slots, queue and processors


@register_system(
    "sge", "PE_HOSTFILE", "JOB_SCRIPT", priority=DetectionPriority.HOSTS, allocation=_of_sge, has_shared_log=True
)
def sge(environ: EnvVariables) -> ClusterEnv | None:
    """Grid Engine (SGE, UGE, Altair): a job's script on its first host, and the hosts of its parallel environment.

    Grid Engine does not number the processes that a script starts on other hosts, by ``qrsh -inherit``; the script of
    ``ddplaunch submit`` does. The system gives the file of hosts (``man sge_pe``) to the job's script alone.
    Raises UsageError if qrsh has started this process on another host of a job.
    """
    if ours := detect_submitted_node("sge", environ, "JOB_ID", "SGE_TASK_ID"):
        return ours
    given = _of_sge(environ)
    started_by_qrsh = environ.get("JOB_SCRIPT") == "QRSH"  # else the script's path
    if started_by_qrsh and environ.is_set("JOB_ID", "PE") and not (given and given.hosts):
        raise UsageError(
            f"JOB_SCRIPT=QRSH on a host of sge job {environ['JOB_ID']}: no variable has its node rank",
            "on every host: ddplaunch run --nnodes N --node-rank I --master-addr HOST …\n"
            "this machine alone: ddplaunch run --standalone …, or --cluster none",
        )
    return env_for_batch_script("sge", ("JOB_ID", "PE_HOSTFILE"), given, START_HINT) if given else None


def _azurebatch_allocation(environ: EnvVariables) -> Allocation | None:
    if not environ.is_set("AZ_BATCH_HOST_LIST", "AZ_BATCH_JOB_ID"):
        return None
    hosts = tuple(environ["AZ_BATCH_HOST_LIST"].split(","))  # 10.0.0.4,10.0.0.5
    return Allocation(environ["AZ_BATCH_JOB_ID"], hosts, "AZ_BATCH_HOST_LIST")


@register_system(
    "azurebatch", "AZ_BATCH_HOST_LIST", priority=DetectionPriority.HOSTS, allocation=_azurebatch_allocation
)
def azurebatch(environ: EnvVariables) -> ClusterEnv | None:
    """Azure Batch: a multi-instance task, whose command runs on its primary node alone, or a subtask on another.

    The variables are those of learn.microsoft.com/azure/batch/batch-compute-node-environment-variables. The variables
    of an mpirun that its command starts are read before. Raises UsageError in a subtask of several.
    """
    listed, is_primary = "AZ_BATCH_HOST_LIST", "AZ_BATCH_IS_CURRENT_NODE_MASTER"
    given = _azurebatch_allocation(environ)
    if given is None:
        return None
    count = len(given.hosts)
    if count > 1 and environ.get(is_primary) == "false":
        raise UsageError(
            f"{is_primary}=false: this is a subtask of one on {count} hosts ({listed}={environ[listed]})",
            f"ddplaunch run --nnodes {count} --node-rank I --master-addr {given.hosts[0]} … on every host\n"
            "or --cluster none …, for this machine alone",
        )
    return env_for_batch_script("azurebatch", (listed, is_primary), given, START_HINT)


HOSTFILES = {
    "cobalt": ("COBALT_JOBID", "COBALT_NODEFILE"),  # job scripts of Argonne's systems: mpirun -f $COBALT_NODEFILE
    # oar.readthedocs.io, oarsub, "the allocated nodes list is contained in $OAR_NODEFILE"; a line a core
    "oar": ("OAR_JOB_ID", "OAR_NODEFILE"),
    # Fujitsu's Technical Computing Suite, as job scripts of its sites have it: mpirun -machinefile $PJM_O_NODEINF
    "pjm": ("PJM_JOBID", "PJM_O_NODEINF"),
}
"""Systems that number nothing, and give a job's script, on its first host, a file of hosts. Of each: the variables
with the job's id and with the path of the file; comments say where these are documented or were seen."""


def _register_host_file_system(name: str, job_id: str, file: str) -> None:
    allocation = _host_file_reader(job_id, file)

    @register_system(name, file, priority=DetectionPriority.HOSTS, allocation=allocation)
    def detect(environ: EnvVariables) -> ClusterEnv | None:
        given = allocation(environ)
        return env_for_batch_script(name, (job_id, file), given, START_HINT) if given else None


for name, variables in HOSTFILES.items():
    _register_host_file_system(name, *variables)
