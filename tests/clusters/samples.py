"""Environments as real systems have given them, without what nobody reads."""

from __future__ import annotations


def _variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.split())


SLURM_BATCH = _variables("""
    CUDA_VISIBLE_DEVICES=0,1
    SLURMD_NODENAME=n1
    SLURM_CPUS_ON_NODE=4
    SLURM_GPUS_ON_NODE=2
    SLURM_GTIDS=0
    SLURM_JOBID=1
    SLURM_JOB_ID=1
    SLURM_JOB_NAME=envdump
    SLURM_JOB_NODELIST=n[1-2]
    SLURM_JOB_NUM_NODES=2
    SLURM_LOCALID=0
    SLURM_NNODES=2
    SLURM_NODEID=0
    SLURM_NODELIST=n[1-2]
    SLURM_NPROCS=4
    SLURM_NTASKS=4
    SLURM_NTASKS_PER_NODE=2
    SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=2(x2)
""")
"""Slurm 22.05: the script of ``sbatch --nodes=2 --ntasks-per-node=2``."""

SLURM_TASK = _variables("""
    CUDA_VISIBLE_DEVICES=0,1
    SLURMD_NODENAME=n2
    SLURM_DISTRIBUTION=block
    SLURM_GPUS_ON_NODE=2
    SLURM_GTIDS=2,3
    SLURM_JOBID=1
    SLURM_JOB_ID=1
    SLURM_JOB_NAME=envdump
    SLURM_JOB_NODELIST=n[1-2]
    SLURM_JOB_NUM_NODES=2
    SLURM_LAUNCH_NODE_IPADDR=10.79.0.11
    SLURM_LOCALID=1
    SLURM_NNODES=2
    SLURM_NODEID=1
    SLURM_NODELIST=n[1-2]
    SLURM_NPROCS=4
    SLURM_NTASKS=4
    SLURM_NTASKS_PER_NODE=2
    SLURM_PROCID=3
    SLURM_SRUN_COMM_PORT=40265
    SLURM_STEPID=0
    SLURM_STEP_GPUS=0,1
    SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=2(x2)
    SLURM_TASKS_PER_NODE=2(x2)
""")
"""Slurm 22.05: the last task of ``srun`` in that script."""

OPENMPI_4 = _variables("""
    OMPI_APP_CTX_NUM_PROCS=4
    OMPI_COMM_WORLD_LOCAL_RANK=3
    OMPI_COMM_WORLD_LOCAL_SIZE=4
    OMPI_COMM_WORLD_NODE_RANK=3
    OMPI_COMM_WORLD_RANK=3
    OMPI_COMM_WORLD_SIZE=4
    OMPI_FIRST_RANKS=0
    OMPI_MCA_ess_base_jobid=435355649
    OMPI_MCA_orte_ess_node_rank=3
    OMPI_MCA_orte_hnp_uri=435355648.0;tcp://192.0.2.2:40645
    OMPI_MCA_orte_num_nodes=1
    OMPI_UNIVERSE_SIZE=2
    PMIX_HOSTNAME=n1
    PMIX_ID=435355649.3
    PMIX_NAMESPACE=435355649
    PMIX_RANK=3
""")
"""Open MPI 4.1.4: the last of ``mpirun -n 4`` on one host."""


def slurm_step(
    tasks: str, nodes: str, count: int, size: int, rank: int, local: int, node: int, **others: str
) -> dict[str, str]:
    """A task of another step of the same job."""
    return {
        **SLURM_TASK,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_NTASKS": str(size),
        "SLURM_NPROCS": str(size),
        "SLURM_NNODES": str(count),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        **others,
    }


def openmpi(rank: int, size: int, local: int, local_size: int, **others: str) -> dict[str, str]:
    """A process of another mpirun, as version 5 tells it."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "OMPI_WORLD_SIZE": str(size),
        "OMPI_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-n1-4711@1",
        "PMIX_HOSTNAME": "n1",
        "PRTE_LAUNCHED": "1",
        **others,
    }


KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}

PYTORCHJOB_OLD = {
    **KUBERNETES,
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "PYTHONUNBUFFERED": "1",
}
PYTORCHJOB = {
    **PYTORCHJOB_OLD,
    "WORLD_SIZE": "16",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
TRAINJOB = {
    **KUBERNETES,
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "my-job",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}

TORCH_NODE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "23456"}
PAI = {**TORCH_NODE, "MASTER_ADDR": "dlc18isgeayd-master-0", "NPROC_PER_NODE": "8"}
VERTEX_AI = {
    **TORCH_NODE,
    "CLOUD_ML_JOB_ID": "8217464138467901440",
    "MASTER_ADDR": "cmle-training-workerpool0-d604929a6a-0",
    "MASTER_PORT": "2222",
}
NNODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500", "NPROC_PER_NODE": "8"}
"""As their manuals tell."""
