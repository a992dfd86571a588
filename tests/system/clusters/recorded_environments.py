"""Environments recorded on real systems, without variables that ddplaunch does not read."""

from __future__ import annotations

import json
from typing import Any

from ddplaunch.system.clusters.cluster_env import ClusterEnv


def require_detected(cluster_env: ClusterEnv | None, **expected: Any) -> ClusterEnv:
    """Return the detected cluster environment; fail if there is none, or if its fields are not as expected."""
    assert cluster_env
    assert {field: getattr(cluster_env, field) for field in expected} == expected
    return cluster_env


def _variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.split())


SLURM_BATCH = _variables("""
    CUDA_VISIBLE_DEVICES=0,1
    SLURMD_NODENAME=n1
    SLURM_GPUS_ON_NODE=2
    SLURM_JOB_ID=1
    SLURM_JOB_NAME=envdump
    SLURM_JOB_NODELIST=n[1-2]
    SLURM_JOB_NUM_NODES=2
    SLURM_LOCALID=0
    SLURM_NNODES=2
    SLURM_NODEID=0
    SLURM_NTASKS=4
    SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=2(x2)
""")
"""Slurm 22.05: the script of ``sbatch --nodes=2 --ntasks-per-node=2``."""

SLURM_TASK = SLURM_BATCH | _variables("""
    SLURMD_NODENAME=n2
    SLURM_DISTRIBUTION=block
    SLURM_LOCALID=1
    SLURM_NODEID=1
    SLURM_PROCID=3
    SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=2(x2)
""")
"""Slurm 22.05: the last task of ``srun`` in that script."""

OPENMPI_4 = _variables("""
    OMPI_COMM_WORLD_LOCAL_RANK=3
    OMPI_COMM_WORLD_LOCAL_SIZE=4
    OMPI_COMM_WORLD_NODE_RANK=3
    OMPI_COMM_WORLD_RANK=3
    OMPI_COMM_WORLD_SIZE=4
    OMPI_MCA_orte_num_nodes=1
    PMIX_HOSTNAME=n1
    PMIX_NAMESPACE=435355649
    PMIX_RANK=3
""")
"""Open MPI 4.1.4: the last of ``mpirun -n 4`` on one host."""


def slurm_step(
    tasks: str, nodes: str, count: int, size: int, rank: int, local: int, node: int, **others: str
) -> dict[str, str]:
    """The variables of a task of another step of the same job."""
    return {
        **SLURM_TASK,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_NTASKS": str(size),
        "SLURM_NNODES": str(count),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        **others,
    }


def openmpi(rank: int, size: int, local: int, local_size: int, **others: str) -> dict[str, str]:
    """A process of another mpirun, with the variables of version 5."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-n1-4711@1",
        "PMIX_HOSTNAME": "n1",
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

TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **TORCH,
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "4",
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
"""From their manuals."""

AZUREML_JOB = {"AZUREML_EXPERIMENT_ID": "6f1c1a3e", "AZUREML_RUN_ID": "loving_drum_4k", "AZUREML_NODE_COUNT": "2"}
AZUREML = {
    **AZUREML_JOB,
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "NODE_RANK": "1",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
}
"""A PyTorch distribution with one process an instance."""

SUBMITIT = _variables("""
    SUBMITIT_EXECUTOR=local
    SUBMITIT_LOCAL_JOB_ID=4711
    SUBMITIT_LOCAL_NTASKS=2
    SUBMITIT_LOCAL_JOB_NUM_NODES=1
    SUBMITIT_LOCAL_GLOBALID=1
    SUBMITIT_LOCAL_LOCALID=1
""")

PALS = _variables("""
    PALS_APID=6f1c1a3e-2f6b-4a7e-9d5f-0d9d3a0c8f51
    PALS_RANKID=3
    PALS_LOCAL_RANKID=1
    PALS_LOCAL_SIZE=2
    PALS_NODEID=1
    PMI_RANK=3
    PMI_SIZE=4
""")

HYDRA = {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
"""Rank 4 of ``mpirun -np 5 -ppn 3`` of Intel MPI on two hosts."""


def mvapich(prefix: str, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    counts = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"{prefix}_COMM_WORLD_{name}": str(count) for name, count in counts.items()}


FLUX = _variables("""
    FLUX_JOB_ID=f2WzFTu3ry1
    FLUX_JOB_SIZE=4
    FLUX_JOB_NNODES=2
    FLUX_TASK_RANK=3
    FLUX_TASK_LOCAL_ID=1
    FLUX_URI=local:///run/flux/local
    PMI_RANK=3
    PMI_SIZE=4
""")

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2024-05-01-12-00-00-000000_mycluster_train_7",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "TRAINING_JOB_NAME": "my-training",
}
AWS_BATCH = _variables("""
    AWS_BATCH_JOB_ID=1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e#1
    AWS_BATCH_JOB_NUM_NODES=3
    AWS_BATCH_JOB_NODE_INDEX=1
    AWS_BATCH_JOB_MAIN_NODE_INDEX=0
    AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4
""")
AWS_BATCH_MAIN = {
    **AWS_BATCH,
    "AWS_BATCH_JOB_ID": "1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e#0",
    "AWS_BATCH_JOB_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "",
}
VOLCENGINE = _variables("""
    MLP_TASK_ID=t-20210924211641-nznsh
    MLP_ROLE=WORKER
    MLP_ROLE_INDEX=1
    MLP_WORKER_NUM=2
    MLP_WORKER_GPU=8
    MLP_WORKER_0_HOST=10.128.97.74
    MLP_WORKER_0_PORT=9006
""")
LEPTON = _variables("""
    LEPTON_JOB_NAME=env-job-98bw
    LEPTON_JOB_SERVICE_PREFIX=env-job-98bw
    LEPTON_SUBDOMAIN=env-job-98bw-job-svc
    LEPTON_JOB_TOTAL_WORKERS=2
    LEPTON_JOB_WORKER_INDEX=1
    LEPTON_RESOURCE_ACCELERATOR_NUM=8
""")
MODELARTS = _variables("""
    MA_NUM_GPUS=8
    MA_NUM_HOSTS=2
    VC_TASK_INDEX=1
    VC_WORKER_NUM=2
    VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job
""")
DETERMINED = {"DET_ALLOCATION_ID": "1.6f1c1a3e.1", "DET_TASK_TYPE": "TRIAL"}

NUMBERED = {
    "dstack": {
        "DSTACK_RUN_NAME": "calm-otter-1",
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    },
    "runpod": {
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "29400",
        "NODE_RANK": "1",
        "NUM_NODES": "2",
        "NUM_TRAINERS": "8",
        "WORLD_SIZE": "16",
    },
    "beaker": {
        "BEAKER_REPLICA_COUNT": "2",
        "BEAKER_REPLICA_RANK": "1",
        "BEAKER_LEADER_REPLICA_HOSTNAME": "10.0.0.4",
    },
    "leaderworkerset": {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "10.0.0.4",
    },
    "ngc": {
        "NGC_JOB_ID": "4711",
        "NGC_ARRAY_SIZE": "2",
        "NGC_ARRAY_INDEX": "1",
        "NGC_MASTER_ADDR": "10.0.0.4",
        "NGC_GPUS_PER_NODE": "8",
    },
}
"""From their manuals, but for the addresses."""


def cluster_spec(role: str, index: float, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})


CHIEF = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]}

OPENPAI = _variables("""
    PAI_JOB_NAME=admin~train
    PAI_TASK_ROLE_LIST=worker
    PAI_TASK_ROLE_TASK_COUNT_worker=2
    PAI_HOST_IP_worker_0=10.0.0.4
    PAI_CURRENT_TASK_ROLE_NAME=worker
    PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX=1
""")
VOLCANO = {
    **KUBERNETES,
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_MY_NODES_HOSTS": "job-my-nodes-0.job,job-my-nodes-1.job",
    "VC_MY_NODES_NUM": "2",
}
CONDOR = {"_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "2", "_CONDOR_SCRATCH_DIR": "/var/lib/condor/execute/dir_4711"}
POD = {
    **KUBERNETES,
    "JOB_COMPLETION_INDEX": "1",
    "DDPLAUNCH_NNODES": "2",
    "MASTER_ADDR": "job-0.job",
    "MASTER_PORT": "29500",
}
GCP_BATCH = {"BATCH_TASK_INDEX": "1", "BATCH_TASK_COUNT": "2"}
JSRUN = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"}
QRSH = {"JOB_ID": "1", "JOB_NAME": "petask", "JOB_SCRIPT": "QRSH", "NHOSTS": "1", "NSLOTS": "1", "PE": "spread"}
"""What qrsh has started on another host, without -V."""
AZURE_BATCH = {
    "AZ_BATCH_JOB_ID": "batchjob001",
    "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5",
    "AZ_BATCH_IS_CURRENT_NODE_MASTER": "true",
}

ALONE = {
    "torchelastic": TORCHRUN,
    "azureml": AZUREML,
    "torch": TORCH,
    "submitit": SUBMITIT,
    "openmpi": OPENMPI_4,
    "pals": PALS,
    "mpich": HYDRA,
    "mvapich": mvapich("MV2", 3, 4, 1, 2),
    "flux": FLUX,
    "slurm": SLURM_TASK,
    "skypilot": SKYPILOT,
    "sagemaker": SAGEMAKER,
    "vertexai": VERTEX_AI,
    "awsbatch": AWS_BATCH,
    "volcengine": VOLCENGINE,
    "lepton": LEPTON,
    "modelarts": MODELARTS,
    "determined": DETERMINED,
    **NUMBERED,
    "kubeflow": TRAINJOB,
    "pai": PAI,
    "nodes": NNODES,
    "tfconfig": {"TF_CONFIG": cluster_spec("worker", 1, **CHIEF)},
    "openpai": OPENPAI,
    "volcano": VOLCANO,
    "htcondor": {**CONDOR, "MASTER_ADDR": "n1"},
    "kubernetes": POD,
    "gcpbatch": GCP_BATCH,
    "nomad": {"NOMAD_ALLOC_INDEX": "1"},
    "lsf": {"LSB_JOBID": "4711", "LSB_DJOB_RANKFILE": "/proc/nowhere"},
    "pbs": {"PBS_JOBID": "1234.server", "PBS_NODEFILE": "/proc/nowhere"},
    "sge": {"JOB_ID": "4711", "PE_HOSTFILE": "/proc/nowhere"},
    "azurebatch": AZURE_BATCH,
    "cobalt": {"COBALT_JOBID": "4711", "COBALT_NODEFILE": "/proc/nowhere"},
    "oar": {"OAR_JOB_ID": "4711", "OAR_NODEFILE": "/proc/nowhere"},
    "pjm": {"PJM_JOBID": "4711", "PJM_O_NODEINF": "/proc/nowhere"},
}
"""A process of each system, in the order in which they are asked."""
