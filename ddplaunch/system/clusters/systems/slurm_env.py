"""Slurm: a step's task, or a job's script and shells, which SLURM_STEP_ID distinguishes.

Names and meanings are those of ``man srun``, "OUTPUT ENVIRONMENT VARIABLES". Only SLURM_STEP_* and the task's own three
belong together. In a batch script PROCID, NODEID and LOCALID are 0 without any step, and NTASKS counts tasks that
were never started; within a step JOB_NODELIST is the whole job's, and NTASKS may be (``srun --preserve-env``).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ddplaunch.base.errors import host_name
from ddplaunch.system.clusters.cluster_env import (
    Allocation,
    ClusterEnv,
    DetectionPriority,
    RankAssignment,
    register_system,
)
from ddplaunch.system.clusters.env_builders import env_for_batch_script, env_for_started_ranks, port_for_job
from ddplaunch.system.clusters.env_variables import EnvVariables, check_below, contradiction_error
from ddplaunch.system.clusters.nodelist import expand_counts, expand_hosts

JOB_ID = "SLURM_JOB_ID"  # 1; an array's task has its own
JOB_NODELIST = "SLURM_JOB_NODELIST"  # n[1-2]
HOST = "SLURMD_NODENAME"  # n2; not in the shell that salloc opens where it was typed

STEP_ID = "SLURM_STEP_ID"  # 0
STEP_NODELIST = "SLURM_STEP_NODELIST"  # n[1-2]
STEP_NUM_NODES = "SLURM_STEP_NUM_NODES"  # 2
STEP_NUM_TASKS = "SLURM_STEP_NUM_TASKS"  # 4
STEP_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"  # 2(x2)
NTASKS = "SLURM_NTASKS"  # 4, the step's or the job's
TASKS_PER_NODE = "SLURM_TASKS_PER_NODE"  # 2(x2), likewise
PROCID = "SLURM_PROCID"  # 3
LOCALID = "SLURM_LOCALID"  # 1
NODEID = "SLURM_NODEID"  # 1, within the step
DISTRIBUTION = "SLURM_DISTRIBUTION"  # block, cyclic:block, plane=2, arbitrary
PTY_PORT = "SLURM_PTY_PORT"  # 41293, from srun --pty

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Ids from here up mean something else (slurm.h): 4294967290 is salloc's shell on a node, …291 the batch script."""

PORTS_PER_JOB = 8  # each of this many steps of a job, and of the thousand jobs around it, has a port of its own


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the whole job's nodes, in the order in which mpirun fills them."""
    variables = EnvVariables(environ)
    if not variables.is_set(JOB_ID):
        return None
    hosts = expand_hosts(environ[JOB_NODELIST], JOB_NODELIST) if variables.is_set(JOB_NODELIST) else ()
    return Allocation(environ[JOB_ID], hosts, JOB_NODELIST)


@register_system("slurm", JOB_ID, priority=DetectionPriority.STEP, allocation=allocation, has_shared_log=True)
def slurm(environ: EnvVariables) -> ClusterEnv | None:
    """Return the cluster environment of a task of a Slurm step, or of a process of a job outside any step."""
    if environ.is_set(STEP_ID) and environ.number(STEP_ID) < FIRST_SPECIAL_STEP:
        return _detect_step(environ)
    return _env_outside_step(environ)


def _detect_step(environ: EnvVariables) -> ClusterEnv:
    job, step, rank, local_rank, node_rank = environ.numbers(JOB_ID, STEP_ID, PROCID, LOCALID, NODEID)
    hosts = expand_hosts(environ.text(STEP_NODELIST), STEP_NODELIST)
    tasks = expand_counts(environ.text(STEP_TASKS_PER_NODE), STEP_TASKS_PER_NODE)
    size, nnodes = environ.numbers(STEP_NUM_TASKS, STEP_NUM_NODES)
    if sum(tasks) != size:
        counted = f"{STEP_TASKS_PER_NODE}={environ[STEP_TASKS_PER_NODE]} (tasks: {sum(tasks)})"
        raise contradiction_error(f"{STEP_NUM_TASKS}={size}", counted)
    _check_ntasks(environ, size)
    for count, name in (len(hosts), STEP_NODELIST), (len(tasks), STEP_TASKS_PER_NODE):
        if count != nnodes:
            raise contradiction_error(f"{STEP_NUM_NODES}={nnodes}", f"{name}={environ[name]} (nodes: {count})")
    check_below(rank, size, PROCID, STEP_NUM_TASKS)
    check_below(node_rank, nnodes, NODEID, STEP_NUM_NODES)
    check_below(local_rank, tasks[node_rank], LOCALID, STEP_TASKS_PER_NODE)
    names = (STEP_ID, PROCID, NODEID, STEP_TASKS_PER_NODE, STEP_NODELIST)
    place = RankAssignment(rank, size, local_rank, tasks[node_rank])
    cluster_env = env_for_started_ranks("slurm", names, place, nnodes=nnodes, node_rank=node_rank, address=hosts[0])
    port = port_for_job(job * PORTS_PER_JOB + step % PORTS_PER_JOB)
    return replace(cluster_env, port=port, run_id=f"{job}.{step}", notes=tuple(_make_notes(environ, cluster_env)))


def _check_ntasks(environ: EnvVariables, size: int) -> None:
    """Raise UsageError if SLURM_NTASKS is neither the step's number of tasks nor the job's."""
    if environ.is_set(NTASKS, TASKS_PER_NODE) and (ntasks := environ.number(NTASKS)) != size:
        tasks = sum(expand_counts(environ[TASKS_PER_NODE], TASKS_PER_NODE))
        if ntasks != tasks:
            counted = f"{TASKS_PER_NODE}={environ[TASKS_PER_NODE]} (tasks: {tasks})"
            raise contradiction_error(f"{NTASKS}={ntasks}", counted)


def _make_notes(environ: EnvVariables, cluster_env: ClusterEnv) -> list[str]:
    notes = []
    if cluster_env.rank_assignment:
        each = environ[STEP_TASKS_PER_NODE]
        notes.append(
            f"Slurm started {each} tasks per node, and each is one rank; for one ddplaunch per node: "
            f"srun --nodes={cluster_env.nnodes} --ntasks={cluster_env.nnodes} --ntasks-per-node=1"
        )
        over_nodes = environ.get(DISTRIBUTION, "block").partition(":")[0].partition(",")[0]
        if over_nodes != "block" and cluster_env.nnodes != 1:
            notes.append(f"{DISTRIBUTION}={environ[DISTRIBUTION]}: the ranks of a node are not consecutive")
    elif environ.is_set(PTY_PORT) and cluster_env.nnodes != 1:
        pty = "if this is a shell from srun --pty, it has one of"
        notes.append(f"{pty} {cluster_env.nnodes} nodes: use --cluster none")
    return notes


def _env_outside_step(environ: EnvVariables) -> ClusterEnv:
    """Return the cluster environment of the batch script, or of a shell in the allocation; SLURM_PROCID is not used."""
    given = allocation(environ)
    assert given
    count = len(given.hosts)
    starter = f"srun --nodes={count} --ntasks={count} --ntasks-per-node=1 ddplaunch run …"
    cluster_env = env_for_batch_script("slurm", (JOB_ID,), given, starter, on=environ.get(HOST) or host_name())
    if not environ.is_set(HOST) and count:
        where = f"Slurm job {given.job_id} ({environ[JOB_NODELIST]})"
        note = f"this shell is not on a node of {where}; to start there: {starter}"
        return replace(cluster_env, notes=(note,))
    return cluster_env
