"""Launchers that number processes: torchrun, mpirun and the like.

torch's variables are set last in a chain of launchers, so they are read first. Azure sets the same
variables with one process per node; there they mean a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters import hydra_pmi, openmpi_pmix
from ddplaunch.system.clusters.cluster_env import ClusterEnv, DetectionPriority, RankAssignment, register_system
from ddplaunch.system.clusters.env_builders import derive_node_place, env_for_started_ranks, env_from_node_variables
from ddplaunch.system.clusters.env_variables import EnvVariables, check_below, contradiction_error

DEFAULT_RUN_ID = "none"  # torchrun's run id where it was given no --rdzv-id


@register_system("torchelastic", "TORCHELASTIC_RUN_ID", priority=DetectionPriority.RANK, has_shared_log=True)
def torchelastic(environ: EnvVariables) -> ClusterEnv | None:
    """torchrun, or another launcher with torch's elastic contract, like ddplaunch: torch's variables and a run id.

    ``torch.distributed.is_torchelastic_launched()`` checks the same variable.
    """
    run_id = "TORCHELASTIC_RUN_ID"  # my-job
    if not (cluster_env := torch.detect(environ)):
        return None
    name = None if environ[run_id] == DEFAULT_RUN_ID else environ[run_id]
    return replace(cluster_env, cluster="torchelastic", variables=(run_id, *cluster_env.variables), run_id=name)


@register_system("azureml", "AZUREML_EXPERIMENT_ID", priority=DetectionPriority.RANK)
def azureml(environ: EnvVariables) -> ClusterEnv | None:
    """Azure Machine Learning: a job with its MPI distribution, or with its PyTorch distribution of one process a node.

    With several processes a node its PyTorch distribution sets all of torch's variables, and those are read as such.
    With one it sets the same, and means a node: the documented way is to start torchrun there with NODE_RANK.
    """
    run_id = environ.get("AZUREML_RUN_ID") or None  # loving_drum_4kwx1yvh2m
    if cluster_env := openmpi.detect(environ):
        cluster_env = replace(cluster_env, cluster="azureml", run_id=run_id or cluster_env.run_id)
        mpi_addresses = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")  # 10.0.0.4:6000; alone without a port
        name = next(filter(environ.is_set, mpi_addresses), None)
        if name is None:
            return cluster_env
        address = environ[name].partition(":")[0]
        return replace(cluster_env, variables=(*cluster_env.variables, name), address=address)
    nnodes, size = "AZUREML_NODE_COUNT", "WORLD_SIZE"  # the latter counts nodes, or processes with several a node
    needed = ("NODE_RANK", size, "MASTER_ADDR")
    if not environ.is_set(*needed) or environ.number(size) != environ.optional_number(nnodes):
        return None
    return env_from_node_variables("azureml", environ, nnodes, "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", run_id=run_id)


@register_system("torch", "LOCAL_RANK", priority=DetectionPriority.RANK)
def torch(environ: EnvVariables) -> ClusterEnv | None:
    """torch's own variables, complete: another launcher has started every process, and this is one of them.

    torchrun and ddplaunch set LOCAL_WORLD_SIZE, Azure ML does not. GROUP_RANK is torchrun's name, NODE_RANK
    Lightning's and Azure ML's.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if not environ.is_set(*needed):
        return None
    rank, world_size, local_rank = environ.numbers("RANK", "WORLD_SIZE", "LOCAL_RANK")
    local_size = environ.optional_number("LOCAL_WORLD_SIZE")
    check_below(rank, world_size, "RANK", "WORLD_SIZE")
    if local_size is not None:
        check_below(local_rank, local_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if local_size > world_size:
            raise contradiction_error(f"LOCAL_WORLD_SIZE={local_size}", f"WORLD_SIZE={world_size}")
    nnodes = environ.optional_number("GROUP_WORLD_SIZE")
    node_rank = next((environ.number(name) for name in ("GROUP_RANK", "NODE_RANK") if environ.is_set(name)), None)
    if local_size == world_size:
        nnodes, node_rank = 1, 0
    place, port = RankAssignment(rank, world_size, local_rank, local_size), environ.number("MASTER_PORT")
    address = environ["MASTER_ADDR"]
    return ClusterEnv("torch", needed, nnodes, node_rank, address=address, port=port, rank_assignment=place)


def check_ambiguous_rank(environ: EnvVariables) -> None:
    """Check that RANK and WORLD_SIZE are not set alone: some systems count nodes with them, others processes.

    A wrong guess would start a separate job on every machine, or too many ranks. Raises UsageError if they are set and
    count more than one.
    """
    size = environ.get("WORLD_SIZE", "").strip()
    if not environ.is_set("RANK", "WORLD_SIZE") or environ.is_set("LOCAL_RANK") or size == "1":
        return
    raise UsageError(
        f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} without LOCAL_RANK: "
        "do they count nodes or processes?",
        'nodes: ddplaunch run --nnodes "$WORLD_SIZE" --node-rank "$RANK" …; processes: set LOCAL_RANK in each\n'
        "neither: ddplaunch run --cluster none …, for this machine alone",
    )


@register_system("submitit", "SUBMITIT_EXECUTOR", priority=DetectionPriority.RANK)
def submitit(environ: EnvVariables) -> ClusterEnv | None:
    """submitit's local executor, which starts tasks on this machine; with its Slurm executor, a Slurm step starts them.

    ``submitit/local/local.py`` sets SUBMITIT_LOCAL_*.
    """
    executor, rank, size = "SUBMITIT_EXECUTOR", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS"
    local_rank = "SUBMITIT_LOCAL_LOCALID"
    if environ[executor] != "local":  # slurm, debug
        return None
    nnodes, job = environ.numbers("SUBMITIT_LOCAL_JOB_NUM_NODES", "SUBMITIT_LOCAL_JOB_ID")  # a process's number
    names, place = (executor, rank, size, local_rank), RankAssignment(*environ.numbers(rank, size, local_rank))
    return env_for_started_ranks("submitit", names, place, nnodes=nnodes, job=job)


OWN_HOST_VARIABLE = "PMIX_HOSTNAME"  # n1


@register_system("openmpi", "OMPI_COMM_WORLD_RANK", priority=DetectionPriority.RANK, has_shared_log=True)
def openmpi(environ: EnvVariables) -> ClusterEnv | None:
    """Open MPI 4 and 5: each process has its rank in OMPI_COMM_WORLD_*, and no variable says which node it is on.

    OMPI_COMM_WORLD_NODE_RANK is the rank *on* its node over all of the job's applications, and no index of nodes; nor
    is the local rank the rank modulo anything: processes may be dealt in any order. Meanings are those of ``man
    mpirun``, "Environment Variables". Where rank 0 is follows, in version 4, from messages of its daemons, which are
    documented nowhere and were observed on real hosts; in version 5 PMIx is queried.
    """
    if environ.is_set("JSM_NAMESPACE_RANK"):  # jsrun's; it sets Open MPI's too, which have less
        return None
    names: tuple[str, ...] = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    rank, size, local_rank, local_size = environ.numbers(*names)
    most_nodes = environ.optional_number("OMPI_MCA_orte_num_nodes")  # 2, those given, used or not; version 4 only
    address = _first_host(environ, rank, size, local_rank, most_nodes) if local_size < size else None
    hosts: tuple[str, ...] = ()
    if local_size < size and most_nodes is None:
        hosts = openmpi_pmix.query_hosts(environ, size) or ()
        address = hosts[0] if hosts else None
    place, used = RankAssignment(rank, size, local_rank, local_size), (*names, OWN_HOST_VARIABLE) if address else names
    known = derive_node_place(hosts, place)
    job = environ.get("PMIX_NAMESPACE")  # 435355649 (version 4), prterun-n1-4711@1 (version 5)
    return env_for_started_ranks("openmpi", used, place, **known, max_nodes=most_nodes, address=address, job=job)


def _first_host(environ: EnvVariables, rank: int, size: int, local_rank: int, used: int | None) -> str | None:
    """Derive rank 0's host: mpirun fills hosts in order, its own host first. None if it cannot be derived.

    Open MPI names all daemons, mpirun's own first, though not on its host: n[1:0-1],[2:10].77.0.12@0(3). A daemon's URI
    begins with its index in that list: 726007808.2;tcp://10.77.0.12:46173. Where one host is idle, and others have
    several ranks, it is taken to be mpirun's own.
    """
    own = environ.get(OWN_HOST_VARIABLE)
    daemon = re.match(r"\d+\.(\d+);", environ.get("OMPI_MCA_orte_local_daemon_uri", ""))
    if own is None or daemon is None or used is None:
        return None
    if rank == local_rank:  # all lower ranks are here
        return own
    names, here = list(_expand_daemons(environ.get("OMPI_MCA_orte_node_regex", ""))), int(daemon[1])
    if not 0 < here < len(names):
        return None
    if used == len(names):
        return names[0]
    if size == used:  # one a node
        return names[here - rank] if rank <= here else None
    return names[1] if used == len(names) - 1 and here > 1 else None


def _expand_daemons(listed: str) -> Iterator[str]:
    """Read a list of hosts: ``prefix[digits:ranges]suffix`` or a plain name, separated by commas."""
    for prefix, digits, ranges, suffix in re.findall(
        r"([^\[\],@]*)(?:\[(\d+):([\d,-]+)\]([^\[\],@]*))?(?:,|$)", listed.partition("@")[0]
    ):
        if not ranges:
            yield from [prefix] if prefix else []
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            for value in range(int(first), int(last or first) + 1):
                yield f"{prefix}{value:0{digits}}{suffix}"


@register_system("pals", "PALS_LOCAL_RANKID", priority=DetectionPriority.RANK, has_shared_log=True)
def pals(environ: EnvVariables) -> ClusterEnv | None:
    """HPE's PALS, the ``mpiexec`` of Cray systems under PBS. It sets PMI's variables in addition to its own.

    ``srun --mpi=cray_shasta`` sets PALS's too; there Slurm's variables have more.
    """
    if environ.is_set("SLURM_STEP_ID"):
        return None
    ranks = ("PALS_RANKID", "PMI_RANK", "PMIX_RANK")
    size, local_rank, local_size, index = "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID"
    names = tuple(name for name in (*ranks, size, local_rank, local_size, index) if environ.is_set(name))
    count, own = environ.numbers(size, local_rank)
    place = RankAssignment(environ.consistent_number(*ranks), count, own, environ.optional_number(local_size))
    node_rank = environ.optional_number(index)
    job = environ.get("PALS_APID")  # 6f1c1a3e-2f6b-4a7e-9d5f-0d9d3a0c8f51
    return env_for_started_ranks("pals", names, place, node_rank=node_rank, job=job)


@register_system("mpich", "MPI_LOCALRANKID", priority=DetectionPriority.RANK, has_shared_log=True)
def mpich(environ: EnvVariables) -> ClusterEnv | None:
    """MPICH and Intel MPI, whose launcher is Hydra.

    PMI_RANK alone does not show it: ``srun --mpi=pmi2``, Flux and PALS set that too. Hydra's own are MPI_LOCALRANKID
    and MPI_LOCALNRANKS (``src/pm/hydra/proxy`` of MPICH). No variable names other hosts, so Hydra is queried.
    """
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if not environ.is_set("PMI_RANK"):
        return None
    # PMIx may be used too. Where Slurm starts Hydra's daemons as a step with PMIx, all of a node have their
    # daemon's PMIX_RANK.
    rank = environ.consistent_number(*(("PMI_RANK",) if environ.is_set("SLURM_STEP_ID") else ("PMI_RANK", "PMIX_RANK")))
    size, local_rank, local_size = environ.numbers(*names[1:])
    job = environ.get("I_MPI_HYDRA_UUID")  # 06000000-8ac7-aeff-ce60-0600efd0d56e, alike on all hosts; Intel's only
    hosts: tuple[int, ...] = ()
    address = None
    if local_size < size and (hydra_job := hydra_pmi.query_hydra(environ, rank, size)):
        hosts, address, job = hydra_job.hosts, hydra_job.first, job or hydra_job.name
    place = RankAssignment(rank, size, local_rank, local_size)
    return env_for_started_ranks("mpich", names, place, **derive_node_place(hosts, place), address=address, job=job)


@register_system(
    "mvapich", "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK", priority=DetectionPriority.RANK, has_shared_log=True
)
def mvapich(environ: EnvVariables) -> ClusterEnv | None:
    """MVAPICH: ``mpirun_rsh`` sets MV2_COMM_WORLD_* (version 2) or MVP_COMM_WORLD_* (version 3 and later)."""
    versions = (
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE"),
    )
    names = next(each for each in versions if environ.is_set(each[0]))
    return env_for_started_ranks("mvapich", names, RankAssignment(*environ.numbers(*names)))


@register_system("flux", "FLUX_TASK_RANK", priority=DetectionPriority.RANK, has_shared_log=True)
def flux(environ: EnvVariables) -> ClusterEnv | None:
    """Flux: a task of ``flux run`` or ``flux submit``. Names are those of ``man flux-environment``.

    The script of ``flux batch`` and the shell of ``flux alloc`` have none of these variables: the broker clears them.
    """
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    rank, size, local_rank, nnodes = environ.numbers(*names)  # each node has one task or more
    job = environ.text("FLUX_JOB_ID")  # ƒ2WzFTu3ry1 or f2WzFTu3ry1
    return env_for_started_ranks("flux", names, RankAssignment(rank, size, local_rank), nnodes=nnodes, job=job)
