"""Tests of detecting each cluster system by its variables: what is found, and what cannot be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters import SYSTEMS, detect
from ddplaunch.system.clusters.cluster_env import ClusterEnv, RankAssignment
from ddplaunch.system.clusters.systems import node_platforms
from ddplaunch.system.network.addresses import list_reachable_addresses
from tests.conftest import write_program
from tests.core.job.test_joining import free_port
from tests.system.clusters import recorded_environments as env

ON_ITS_OWN = "is treated as a job of its own"

POOLS = {"workerpool0": ["p0-0:2222"], "workerpool1": ["p1-0:2222", "p1-1:2222"], "workerpool2": ["p2-0:2222"]}
SGE = {"JOB_ID": "4711", "JOB_SCRIPT": "/job"}
OF_OURS = {"DDPLAUNCH_HOSTS": "n1,n2", "DDPLAUNCH_NODE_RANK": "1"}  # of a job of `ddplaunch submit`


def detect_by(name: str, environ: Mapping[str, str]) -> ClusterEnv | None:
    """What one system detects, without the others."""
    return SYSTEMS[name].detect(environ)


def a_node(nnodes: int, node_rank: int, **others: Any) -> dict[str, Any]:
    return {"nnodes": nnodes, "node_rank": node_rank, "rank_assignment": None, **others}


def a_rank(*place: int | None, **others: Any) -> dict[str, Any]:
    return {"rank_assignment": RankAssignment(*place), **others}  # type: ignore[arg-type]


FOUND: list[tuple[str, Mapping[str, str], dict[str, Any]]] = [
    ("torchelastic", env.TORCHRUN, a_rank(3, 4, 1, 2, run_id="my-job")),
    ("torchelastic", {**env.TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, a_rank(3, 4, 1, 2, run_id=None)),
    (
        "azureml",
        {**env.AZUREML_JOB, **env.openmpi(3, 4, 1, 2), "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        a_rank(3, 4, 1, 2, address="10.0.0.4"),
    ),
    (
        "azureml",
        {**env.AZUREML_JOB, **env.openmpi(1, 2, 1, 2), "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"},
        {"nnodes": 1, "address": "10.0.0.4"},
    ),
    ("azureml", env.AZUREML, a_node(2, 1, address="10.0.0.4", port=6105, run_id="loving_drum_4k")),
    ("torch", env.TORCH, a_rank(3, 4, 1, None, nnodes=None, node_rank=None, address="n1", port=29500)),
    ("torch", env.TORCHRUN, a_rank(3, 4, 1, 2, nnodes=2, node_rank=1)),
    ("torch", {**env.TORCH, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, {"nnodes": 1, "node_rank": 0}),
    ("submitit", env.SUBMITIT, a_rank(1, 2, 1, 2, nnodes=1, address="127.0.0.1", run_id="4711")),
    (
        "submitit",
        {**env.SUBMITIT, "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0"},
        a_node(1, 0),
    ),
    ("pals", env.PALS, a_rank(3, 4, 1, 2, node_rank=1, run_id=env.PALS["PALS_APID"])),
    ("pals", {**env.PALS, "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1", "PALS_NODEID": "3"}, a_node(4, 3)),
    ("pals", {**env.PALS, "PALS_LOCAL_SIZE": ""}, a_rank(3, 4, 1, None)),
    ("mpich", env.HYDRA, a_rank(4, 5, 1, 2, nnodes=None, node_rank=None, port=None, run_id=None)),
    ("mpich", {**env.HYDRA, "PMIX_RANK": "4"}, a_rank(4, 5, 1, 2)),
    ("mpich", {**env.HYDRA, "PMIX_RANK": "1", "SLURM_STEP_ID": "0"}, a_rank(4, 5, 1, 2)),  # that is its daemon's
    ("mpich", {**env.HYDRA, "I_MPI_HYDRA_UUID": "06000000-8ac7"}, a_rank(4, 5, 1, 2, run_id="06000000-8ac7")),
    ("mpich", {**env.HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, a_node(5, 4)),
    ("mvapich", env.mvapich("MV2", 3, 4, 1, 2), a_rank(3, 4, 1, 2)),
    ("mvapich", env.mvapich("MVP", 3, 4, 1, 2), a_rank(3, 4, 1, 2)),
    ("mvapich", env.mvapich("MVP", 3, 4, 0, 1), a_node(4, 3)),
    ("flux", env.FLUX, a_rank(3, 4, 1, None, nnodes=2, node_rank=None, run_id="f2WzFTu3ry1")),
    ("flux", {**env.FLUX, "FLUX_JOB_NNODES": "4", "FLUX_TASK_LOCAL_ID": "0"}, a_node(4, 3)),
    (
        "flux",
        {**env.FLUX, "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"},
        a_rank(3, 4, 3, 4, nnodes=1, node_rank=0, address="127.0.0.1"),
    ),
    ("skypilot", env.SKYPILOT, a_node(2, 1, address="10.0.0.4", nproc="8")),
    ("sagemaker", env.ALONE["sagemaker"], a_node(2, 1, address="algo-1", nproc="8", run_id="my-training")),
    ("sagemaker", {**env.ALONE["sagemaker"], "SM_NUM_GPUS": "0"}, a_node(2, 1, nproc=None)),
    ("vertexai", env.VERTEX_AI, a_node(2, 1, address=env.VERTEX_AI["MASTER_ADDR"], port=2222, nproc=None)),
    ("awsbatch", env.AWS_BATCH, a_node(3, 1, address="10.0.0.4")),
    *(
        (
            "awsbatch",
            {**env.AWS_BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2", "AWS_BATCH_JOB_NODE_INDEX": index},
            a_node(3, rank),
        )
        for index, rank in (("2", 0), ("0", 1), ("1", 2))
    ),
    (
        "volcengine",
        env.VOLCENGINE,
        a_node(2, 1, nproc="8", address="10.128.97.74", port=9006, run_id=env.VOLCENGINE["MLP_TASK_ID"]),
    ),
    ("volcengine", {**env.VOLCENGINE, "MLP_WORKER_GPU": "0"}, {"nproc": None}),
    (
        "lepton",
        env.LEPTON,
        a_node(
            2,
            1,
            nproc="8",
            address="env-job-98bw-0.env-job-98bw-job-svc",
            address_may_be_unknown=True,
            run_id="env-job-98bw",
        ),
    ),
    (
        "lepton",
        {
            "LEPTON_JOB_TOTAL_WORKERS": "1",
            "LEPTON_JOB_WORKER_INDEX": "0",
            "LEPTON_RESOURCE_ACCELERATOR_NUM": "0",
        },
        a_node(1, 0, address=None, nproc=None),
    ),
    (
        "modelarts",
        env.ALONE["modelarts"],
        a_node(2, 1, nproc="8", address="job-worker-0.job", address_may_be_unknown=True),
    ),
    ("modelarts", {"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "0", "VC_TASK_INDEX": "7"}, a_node(1, 0, nproc=None)),
    ("dstack", env.NUMBERED["dstack"], {"run_id": "calm-otter-1"}),
    ("dstack", {**env.NUMBERED["dstack"], "DSTACK_GPUS_PER_NODE": "0"}, {"nproc": None}),
    ("runpod", env.NUMBERED["runpod"], {"port": 29400}),
    (
        "beaker",
        {**env.NUMBERED["beaker"], "BEAKER_LEADER_REPLICA_HOSTNAME": ""},
        a_node(
            1,
            0,
            may_be_single=True,
            notes=(
                "BEAKER_REPLICA_RANK=1 without BEAKER_LEADER_REPLICA_HOSTNAME: this replica is treated as a job of its "
                "own",
            ),
        ),
    ),
    ("kubeflow", env.TRAINJOB, a_node(3, 1, nproc="auto", address="job-node-0-0.job", port=29500)),
    ("kubeflow", {**env.TRAINJOB, "PET_NNODES": "3:3"}, {"nnodes": 3}),
    ("kubeflow", env.PYTORCHJOB_OLD, a_node(2, 1, nproc=None, address="job-master-0", port=23456)),
    ("kubeflow", env.PYTORCHJOB, a_node(2, 1, nproc="8", address="job-master-0", port=23456)),
    ("pai", env.PAI, a_node(2, 1, address=env.PAI["MASTER_ADDR"], port=23456, nproc="8")),
    ("nodes", env.NNODES, a_node(2, 1, address="10.0.0.4", port=29500, nproc="8")),
    *(
        (
            "tfconfig",
            {name: written},
            a_node(3, node_rank, address=address, port=2222, variables=(name,)),
        )
        for name, written, node_rank, address in (
            ("TF_CONFIG", env.cluster_spec("chief", 0, **env.CHIEF), 0, "a"),
            ("TF_CONFIG", env.cluster_spec("worker", 1, **env.CHIEF), 2, "a"),
            ("TF_CONFIG", env.cluster_spec("worker", 2, worker=["[fd77::10]:2222", "b:2222", "c:2222"]), 2, "fd77::10"),
            ("CLUSTER_SPEC", env.cluster_spec("workerpool0", 0, **POOLS), 0, "p0-0"),
            ("CLUSTER_SPEC", env.cluster_spec("workerpool1", 1.0, **POOLS), 2, "p0-0"),
        )
    ),
    ("openpai", env.OPENPAI, a_node(2, 1, address="10.0.0.4", run_id="admin~train")),
    (
        "openpai",
        {
            **env.OPENPAI,
            "PAI_TASK_ROLE_TASK_COUNT_worker": "1",
            "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "0",
            "PAI_HOST_IP_worker_0": "",
        },
        a_node(1, 0, address=None),
    ),
    (
        "volcano",
        {**env.VOLCANO, "VC_TASK_INDEX": ""},
        a_node(2, 1, address="job-my-nodes-0.job", address_may_be_unknown=True),
    ),
    (
        "volcano",
        {**env.VOLCANO, "VK_TASK_INDEX": ""},
        a_node(2, 1, address="job-my-nodes-0.job", address_may_be_unknown=True),
    ),
    (
        "volcano",
        {**env.VOLCANO, "VC_MY_NODES_HOSTS": ""},
        a_node(
            1,
            0,
            notes=(f"VC_TASK_INDEX=1 without VC_…_HOSTS of the svc plugin: this pod {ON_ITS_OWN}",),
        ),
    ),
    ("htcondor", {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "1"}, a_node(1, 0)),
    ("htcondor", {**env.CONDOR, "MASTER_ADDR": "n1"}, a_node(2, 1, address="n1")),
    ("kubernetes", env.POD, a_node(2, 1, address="job-0.job", port=29500, address_may_be_unknown=True)),
    (
        "kubernetes",
        {**env.POD, "DDPLAUNCH_NNODES": "2:4", "JOB_COMPLETION_INDEX": "3"},
        {"min_nodes": 2, "nnodes": 4, "node_rank": 3},
    ),
    # beside a Service called master
    (
        "kubernetes",
        {**env.POD, "JOB_COMPLETION_INDEX": "0", "DDPLAUNCH_NNODES": "1", "MASTER_PORT": "tcp://10.96.3.1:80"},
        {"nnodes": 1, "port": None},
    ),
    (
        "kubernetes",
        {**env.KUBERNETES, "JOB_COMPLETION_INDEX": "7"},
        a_node(1, 0, notes=(f"JOB_COMPLETION_INDEX=7 without DDPLAUNCH_NNODES: this pod {ON_ITS_OWN}",)),
    ),
    (
        "gcpbatch",
        env.GCP_BATCH,
        a_node(
            1,
            0,
            may_be_single=True,
            notes=(f"BATCH_TASK_INDEX=1 without BATCH_HOSTS_FILE: this task {ON_ITS_OWN}",),
        ),
    ),
    (
        "gcpbatch",
        {"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "1"},
        a_node(1, 0, may_be_single=False, notes=()),
    ),
    (
        "nomad",
        {"NOMAD_ALLOC_INDEX": "1"},
        a_node(
            1,
            0,
            may_be_single=True,
            notes=(f"NOMAD_ALLOC_INDEX=1 without a count: this allocation {ON_ITS_OWN}",),
        ),
    ),
    ("pbs", {"PBS_JOBID": "1234.server", "PBS_NODEFILE": "/proc/nowhere", "PBS_NODENUM": "1"}, a_node(1, 0, notes=())),
    (
        "pbs",
        {"PBS_JOBID": "1234.server", "PBS_NODENUM": "7", **OF_OURS},
        a_node(2, 1, address="n1", is_batch_script=False, run_id="1234.server"),
    ),
    ("pbs", {"PBS_JOBID": "4711[0].pbs01", "PBS_ARRAY_INDEX": "0", **OF_OURS}, {"run_id": "4711_0.pbs01"}),
    (
        "sge",
        {**SGE, **OF_OURS},
        a_node(2, 1, address="n1", run_id="4711", is_batch_script=False),
    ),
    ("sge", {**SGE, **OF_OURS, "SGE_TASK_ID": "undefined"}, {"run_id": "4711"}),
    ("sge", {**SGE, **OF_OURS, "SGE_TASK_ID": "3"}, {"run_id": "4711_3"}),
    ("azurebatch", env.AZURE_BATCH, a_node(1, 0, is_batch_script=True)),
]


@pytest.mark.parametrize(("name", "environ", "expected"), FOUND)
def test_detected_cluster_environments(name: str, environ: Mapping[str, str], expected: Mapping[str, Any]) -> None:
    env.require_detected(detect_by(name, environ), cluster=name, **expected)


LEFT_TO_OTHERS: list[tuple[str, Mapping[str, str]]] = [
    *(("torchelastic", {**env.TORCHRUN, name: ""}) for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK")),
    ("azureml", {**env.AZUREML, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}),  # several a node: torch's to tell
    ("azureml", env.AZUREML_JOB),
    *(("torch", {**env.TORCH, name: ""}) for name in env.TORCH),
    ("torch", env.PYTORCHJOB_OLD),
    ("submitit", {**env.SUBMITIT, "SUBMITIT_EXECUTOR": "slurm"}),
    ("submitit", {**env.SUBMITIT, "SUBMITIT_EXECUTOR": "debug"}),
    ("pals", {**env.PALS, "SLURM_STEP_ID": "0"}),  # srun --mpi=cray_shasta; Slurm knows the hosts
    ("mpich", {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"}),  # srun --mpi=pmi2 and Flux
    ("mvapich", {"MV2_ENABLE_AFFINITY": "0"}),
    ("flux", {"FLUX_URI": "local:///tmp/flux-x/local-0", "FLUX_ENCLOSING_ID": "f2WzFTu3ry1"}),  # a batch script
    ("vertexai", {**env.VERTEX_AI, "LOCAL_RANK": "0"}),
    ("pai", {**env.PAI, "LOCAL_RANK": "0"}),
    ("awsbatch", {"AWS_BATCH_JOB_ID": "1c2f5a5e", "AWS_BATCH_JOB_ARRAY_INDEX": "3"}),
    ("kubeflow", env.KUBERNETES),
    ("kubeflow", {**env.PYTORCHJOB_OLD, "LOCAL_RANK": "0"}),
    ("kubeflow", {name: value for name, value in env.PYTORCHJOB_OLD.items() if name not in env.KUBERNETES}),
    ("nodes", {**env.NNODES, "NNODES": "1"}),
    ("nodes", {"NNODES": "2", "NPROC_PER_NODE": "8"}),  # no address
    *(
        ("tfconfig", {"TF_CONFIG": written})
        for written in ("{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}')
    ),
    ("volcano", env.KUBERNETES),
    ("htcondor", {"_CONDOR_SCRATCH_DIR": "/var/lib/condor/execute/dir_4711", "_CONDOR_SLOT": "slot1_1"}),
    ("kubernetes", env.KUBERNETES),
    ("nomad", {"NOMAD_JOB_NAME": "train"}),
    ("lsf", {"LSF_ENVDIR": "/opt/lsf/conf"}),
    ("pbs", {"PBS_CONF_FILE": "/etc/pbs.conf"}),
    ("sge", {"JOB_ID": "4711", "SGE_ROOT": "/opt/sge"}),
    ("sge", {**env.QRSH, "PE": ""}),  # qrsh in a terminal, on one host
    ("azurebatch", {"AZ_BATCH_JOB_ID": "batchjob001", "AZ_BATCH_NODE_ID": "tvm-1"}),
]


@pytest.mark.parametrize(("name", "environ"), LEFT_TO_OTHERS)
def test_incomplete_variables_are_not_detected(name: str, environ: Mapping[str, str]) -> None:
    assert detect_by(name, environ) is None


REFUSED: list[tuple[str, Mapping[str, str], str]] = [
    ("torch", {"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict"),
    ("torch", {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict"),
    ("torch", {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 and WORLD_SIZE=4 contradict"),
    ("torch", {"MASTER_PORT": "auto"}, "MASTER_PORT=auto is not a number"),
    ("submitit", {"SUBMITIT_LOCAL_NTASKS": ""}, "SUBMITIT_LOCAL_NTASKS is not set"),
    ("pals", {"PMI_RANK": "2"}, "PALS_RANKID=3 and PMI_RANK=2 contradict each other"),
    ("pals", {"PMIX_RANK": "2"}, "PALS_RANKID=3 and PMIX_RANK=2 contradict each other"),
    ("mpich", {"PMIX_RANK": "1"}, "PMI_RANK=4 and PMIX_RANK=1 contradict each other"),
    *(("mpich", {name: "1x"}, f"{name}=1x is not a number") for name in sorted(set(env.HYDRA) - {"PMI_FD"})),
    *(
        ("openmpi", {f"OMPI_COMM_WORLD_{name}": ""}, f"OMPI_COMM_WORLD_{name} is not set")
        for name in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    ("openmpi", {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK=x is not a number"),
    ("openmpi", {"OMPI_COMM_WORLD_RANK": "4"}, "openmpi's rank 4 and its size 4 contradict"),
    ("openmpi", {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "local rank 4 and .* local size 4"),
    ("openmpi", {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "local size 5 and .* size 4"),
    ("mvapich", {"MV2_COMM_WORLD_LOCAL_RANK": ""}, "MV2_COMM_WORLD_LOCAL_RANK is not set"),
    ("flux", {"FLUX_JOB_NNODES": ""}, "FLUX_JOB_NNODES is not set"),
    ("skypilot", {"SKYPILOT_NUM_NODES": "3"}, r"NUM_NODES=3 and SKYPILOT_NODE_IPS=10.0.0.4,10.0.0.5 \(nodes: 2\)"),
    ("skypilot", {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2 and addresses in SKYPILOT_NODE_IPS=2"),
    ("skypilot", {"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not set"),
    *(
        ("sagemaker", {"SM_HOSTS": listed}, "is not a JSON list of hosts")
        for listed in ("algo-1,algo-2", "[]", "{}", "[1, 2]", "[")
    ),
    ("sagemaker", {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3 contradict"),
    ("awsbatch", {"AWS_BATCH_JOB_NODE_INDEX": "3"}, "JOB_NODE_INDEX=3 and AWS_BATCH_JOB_NUM_NODES=3 contradict"),
    ("awsbatch", {"AWS_BATCH_JOB_MAIN_NODE_INDEX": ""}, "AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"),
    ("awsbatch", {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}, "PRIVATE_IPV4_ADDRESS is not set"),
    ("volcengine", {"MLP_ROLE": "PS"}, "MLP_ROLE=PS: this machine is not one of the workers that MLP_WORKER_NUM=2"),
    ("volcengine", {"MLP_ROLE_INDEX": "2"}, "MLP_ROLE_INDEX=2 and MLP_WORKER_NUM=2 contradict"),
    ("volcengine", {"MLP_WORKER_0_HOST": ""}, "MLP_WORKER_0_HOST is not set"),
    *(
        ("lepton", {name: ""}, "of LEPTON_JOB_TOTAL_WORKERS=2 nodes")
        for name in ("LEPTON_JOB_SERVICE_PREFIX", "LEPTON_SUBDOMAIN")
    ),
    ("lepton", {"LEPTON_JOB_WORKER_INDEX": "2"}, "WORKER_INDEX=2 and LEPTON_JOB_TOTAL_WORKERS=2 contradict"),
    ("modelarts", {"VC_WORKER_NUM": "3"}, "MA_NUM_HOSTS=2 and VC_WORKER_NUM=3 contradict"),
    ("modelarts", {"VC_TASK_INDEX": "2"}, "VC_TASK_INDEX=2 and MA_NUM_HOSTS=2 contradict"),
    ("modelarts", {"VC_WORKER_HOSTS": ""}, "VC_WORKER_HOSTS is not set"),
    ("modelarts", {"VC_WORKER_HOSTS": "a.job"}, r"MA_NUM_HOSTS=2 and VC_WORKER_HOSTS=a.job \(nodes: 1\) contradict"),
    ("kubeflow", {"PET_NNODES": "1:3"}, "PET_NNODES=1:3: the pods of an elastic job"),
    ("kubeflow", {"PET_NNODES": "two"}, "PET_NNODES=two is not a number"),
    ("kubeflow", {"PET_NODE_RANK": "3"}, "PET_NODE_RANK=3 and PET_NNODES=3 contradict"),
    ("kubeflow", {"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many is not a number"),
    ("kubeflow", {"PET_MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ("nodes", {"NODE_RANK": ""}, "NODE_RANK is not set"),
    (
        "nodes",
        {"NODE_RANK": "", "RANK": "1"},
        "NNODES=2, RANK=1, MASTER_ADDR=10.0.0.4: this may be one node of several",
    ),
    ("nodes", {"NODE_RANK": "2"}, "NODE_RANK=2 and NNODES=2 contradict"),
    ("nodes", {"NNODES": "two"}, "NNODES=two is not a number"),
    ("nodes", {"NPROC_PER_NODE": "many"}, "NPROC_PER_NODE=many is not a number"),
    *(
        (
            "tfconfig",
            {"TF_CONFIG": env.cluster_spec(*who, **env.CHIEF)},
            f"TF_CONFIG: this is {who[0]} {who[1]}, not one of the 3",
        )
        for who in (("ps", 0), ("evaluator", 0), ("worker", 2))
    ),
    *(
        ("tfconfig", {"TF_CONFIG": written}, "does not describe a cluster")
        for written in ("x", "[]", "[" * 50_000, '{"cluster": {"worker": ["a:1"]}}', '{"cluster": {"worker": ["a"]}}')
    ),
    *(
        ("tfconfig", {"TF_CONFIG": env.cluster_spec("worker", index, worker=["a:1"])}, "does not describe a cluster")
        for index in (float("inf"), "x", 0.5)
    ),
    ("openpai", {"PAI_TASK_ROLE_LIST": "ps,worker"}, "counts within worker, but the job has 2 task roles: ps, worker"),
    ("openpai", {"PAI_HOST_IP_worker_0": ""}, "PAI_HOST_IP_worker_0 is not set"),
    ("openpai", {"PAI_TASK_ROLE_TASK_COUNT_worker": "1"}, "TASK_INDEX=1 and PAI_TASK_ROLE_TASK_COUNT_worker=1 contra"),
    (
        "volcano",
        {"VC_MASTER_HOSTS": "job-master-0.job", "VC_MASTER_NUM": "1"},
        "but the job has 2: VC_MASTER_HOSTS, VC_MY_NODES_HOSTS",
    ),
    ("volcano", {"VK_TASK_INDEX": "0"}, "VC_TASK_INDEX=1 and VK_TASK_INDEX=0 contradict"),
    ("volcano", {"VC_TASK_INDEX": "2", "VK_TASK_INDEX": "2"}, "INDEX=2 and hosts in VC_MY_NODES_HOSTS=2 contradict"),
    ("volcano", {"VC_MY_NODES_NUM": "3"}, r"VC_MY_NODES_NUM=3 and VC_MY_NODES_HOSTS=\S+ \(nodes: 2\) contradict"),
    ("kubernetes", {"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2 and DDPLAUNCH_NNODES=2 contradict"),
    ("kubernetes", {"DDPLAUNCH_NNODES": "x"}, "DDPLAUNCH_NNODES=x is not a number"),
    ("kubernetes", {"DDPLAUNCH_NNODES": "4:2"}, "DDPLAUNCH_NNODES=4:2 is not a range like 2:4"),
    ("kubernetes", {"DDPLAUNCH_NNODES": "0:2"}, "DDPLAUNCH_NNODES=0:2"),
    ("kubernetes", {"DDPLAUNCH_NNODES": "2:"}, "DDPLAUNCH_NNODES= is not a number"),
    ("kubernetes", {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ("sge", {**OF_OURS, "DDPLAUNCH_NODE_RANK": "2"}, "DDPLAUNCH_NODE_RANK=2 and hosts in DDPLAUNCH_HOSTS=2 contradict"),
    ("sge", {**env.QRSH, "PE_HOSTFILE": ""}, "JOB_SCRIPT=QRSH on a host of sge job 1: no variable has its node rank"),
    ("azurebatch", {"AZ_BATCH_IS_CURRENT_NODE_MASTER": "false"}, "this is a subtask of one on 2 hosts"),
]


@pytest.mark.parametrize(("name", "changed", "expected"), REFUSED)
def test_contradicting_variables_are_refused(name: str, changed: Mapping[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        detect_by(name, {**env.ALONE[name], **changed})


@pytest.mark.parametrize(
    ("name", "changed", "typed"),
    [
        ("lepton", {"LEPTON_SUBDOMAIN": ""}, '--node-rank "$LEPTON_JOB_WORKER_INDEX" --master-addr …'),
        ("volcano", {"VC_MASTER_HOSTS": "m"}, "--nnodes 3 --node-rank … --master-addr m"),
        ("azurebatch", {"AZ_BATCH_IS_CURRENT_NODE_MASTER": "false"}, "--nnodes 2 --node-rank I --master-addr 10.0.0.4"),
    ],
)
def test_hints_of_refusals(name: str, changed: Mapping[str, str], typed: str) -> None:
    with pytest.raises(UsageError) as raised:
        detect_by(name, {**env.ALONE[name], **changed})
    assert typed in str(raised.value.hint)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("skypilot", {"SKYPILOT_TASK_ID": "sky-2024-05-01-12-00-00-000000_mycluster_train_8"}),
        ("dstack", {"DSTACK_RUN_NAME": "calm-otter-2"}),
        ("lepton", {"LEPTON_JOB_NAME": "other"}),
        ("openpai", {"PAI_JOB_NAME": "other"}),
        ("pals", {"PALS_APID": "other"}),
        ("mpich", {"I_MPI_HYDRA_UUID": "06000000-8ac7-aeff-ce60-0601"}),
    ],
)
def test_each_job_has_a_port_of_its_own(name: str, changed: Mapping[str, str]) -> None:
    one, other = detect_by(name, env.ALONE[name]), detect_by(name, {**env.ALONE[name], **changed})
    assert one
    assert other
    assert other.port
    assert one.port != other.port


# ------------------------------------------------------------------------------------------- rows of numbered nodes

ROWS = {row.cluster: row for row in node_platforms.NODE_VARIABLE_SYSTEMS}


@pytest.mark.parametrize("name", ROWS)
def test_numbered_nodes(name: str) -> None:
    row, environ = ROWS[name], env.NUMBERED[name]
    expected = a_node(2, 1, address="10.0.0.4", nproc="8" if row.nproc else None, may_be_single=False)
    env.require_detected(detect(environ), cluster=name, **expected)
    alone = detect({**environ, row.nnodes: "1", row.node_rank: "0", row.address: ""}, name)
    env.require_detected(alone, nnodes=1, node_rank=0, address=None)
    with pytest.raises(UsageError, match=f"{row.node_rank}=2 and {row.nnodes}=2 contradict"):
        detect({**environ, row.node_rank: "2"})
    with pytest.raises(UsageError, match=f"{row.node_rank} is not set"):
        detect({**environ, row.node_rank: "", row.address: ""})
    assert "." in row.source or "NVIDIA" in row.source


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.independent_without_address])
def test_several_numbered_nodes_need_an_address(name: str) -> None:
    row = ROWS[name]
    with pytest.raises(UsageError, match=f"{row.node_rank}=1 of {row.nnodes}=2 nodes") as raised:
        detect({**env.NUMBERED[name], row.address: ""})
    assert f'--nnodes "${row.nnodes}" --node-rank "${row.node_rank}"' in str(raised.value.hint)


# ------------------------------------------------------------------------------------------------ what files tell


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        '{"container_rank": 0}',
        '{"container_addrs": ["a"], "container_rank": 1}',
        '{"container_addrs": ["10.0.0.4", "10.0.0.5"], "container_rank": 1, "container_slot_counts": [8, 8]}',
    ],
)
def test_a_trial_of_determined(text: str | None, hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_platforms, "RENDEZVOUS", str(hosts))
    environ = env.ALONE["determined"]
    if text is None:  # another task
        assert detect_by("determined", environ) is None
        return
    hosts.write_text(text)
    if "10.0.0.4" in text:
        expected = {"address": "10.0.0.4", "run_id": "1.6f1c1a3e.1"}
        env.require_detected(detect_by("determined", environ), nnodes=2, node_rank=1, **expected)
    else:
        expected = r"does not say which container this is|container_rank=1 and container_addrs=1"
        with pytest.raises(UsageError, match=expected):
            detect_by("determined", environ)


def test_hosts_of_google_are_numbered_by_their_place_in_the_file(hosts: Path) -> None:
    own = os.uname().nodename
    hosts.write_text(f"other-0.c.project.internal\n{own}\n")
    found = detect_by("gcpbatch", {**env.GCP_BATCH, "BATCH_TASK_INDEX": "0", "BATCH_HOSTS_FILE": str(hosts)})
    env.require_detected(found, nnodes=2, node_rank=1, address="other-0.c.project.internal")
    hosts.write_text("a\nb\n")
    with pytest.raises(UsageError, match=f"does not have this machine, {own}"):
        detect_by("gcpbatch", {**env.GCP_BATCH, "BATCH_HOSTS_FILE": str(hosts)})
    with pytest.raises(UsageError, match=r"BATCH_TASK_COUNT=3 and BATCH_HOSTS_FILE=\S+ \(hosts: 2\) contradict"):
        detect_by("gcpbatch", {**env.GCP_BATCH, "BATCH_TASK_COUNT": "3", "BATCH_HOSTS_FILE": str(hosts)})


HOSTFILES = {
    "cobalt": ("COBALT_JOBID", "COBALT_NODEFILE"),
    "oar": ("OAR_JOB_ID", "OAR_NODEFILE"),
    "pjm": ("PJM_JOBID", "PJM_O_NODEINF"),
    "sge": ("JOB_ID", "PE_HOSTFILE"),
    "pbs": ("PBS_JOBID", "PBS_NODEFILE"),
    "lsf": ("LSB_JOBID", "LSB_DJOB_RANKFILE"),
}


@pytest.mark.parametrize("name", HOSTFILES)
def test_a_script_gets_a_note_about_its_hosts(name: str, hosts: Path) -> None:
    job_id, file = HOSTFILES[name]
    job = {job_id: "4711", file: str(hosts)}
    hosts.write_text("n1 4 all.q@n1 UNDEFINED\nn1\nn2\nn2\n")
    cluster_env = env.require_detected(detect(job), cluster=name, nnodes=1, node_rank=0, is_batch_script=True)
    assert f"the script of {name} job 4711 runs on one of its 2 hosts; to use all: " in cluster_env.notes[0]
    rank = env.require_detected(detect({**job, **env.openmpi(3, 4, 1, 2)}), cluster="openmpi", address="n1")
    assert rank.port
    assert file in rank.variables
    hosts.write_text("n1\nn1\n")
    env.require_detected(detect(job), notes=())


def test_a_process_on_another_host_than_the_scripts_is_refused(hosts: Path) -> None:
    """A user's ssh or the like has started it there, and perhaps on all hosts."""
    own = os.uname().nodename
    hosts.write_text(f"n1.cluster\n{own}.cluster\n")
    with pytest.raises(UsageError) as raised:
        detect({"OAR_JOB_ID": "4711", "OAR_NODEFILE": str(hosts)})
    expected = f"the script of oar job 4711 runs on n1.cluster, and this is {own}.cluster: it may be one of 2 nodes"
    assert raised.value.message == expected
    assert "--nnodes 2 --node-rank 1 --master-addr n1.cluster" in str(raised.value.hint)
    hosts.write_text(f"{own}\nn2\n")
    env.require_detected(detect({"OAR_JOB_ID": "4711", "OAR_NODEFILE": str(hosts)}), is_batch_script=True)


def test_the_job_of_a_launch_node(hosts: Path) -> None:
    """The script runs on a launch node, and jsrun starts ranks on two hosts of three slots."""
    hosts.write_text("batch2\n" + "h41n03\n" * 3 + "h41n04\n" * 3)
    job = {"LSB_JOBID": "4711", "LSB_DJOB_RANKFILE": str(hosts), "CSM_ALLOCATION_ID": "17"}

    def found(rank: int, size: int, local_rank: int, **others: str) -> ClusterEnv | None:
        numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank}
        task = {f"JSM_NAMESPACE_{name}": str(value) for name, value in numbers.items()}
        return detect_by("lsf", {**job, **task, **others})

    several = a_rank(4, 6, 1, None, address="h41n03", run_id="4711", nnodes=None, node_rank=None)
    env.require_detected(found(4, 6, 1), **several)
    env.require_detected(found(1, 2, 0, JSM_NAMESPACE_LOCAL_SIZE="1"), **a_node(2, 1))
    env.require_detected(found(1, 2, 1), **a_rank(1, 2, 1, None))  # two may share the first of two hosts
    env.require_detected(found(4, 6, 1, LSB_DJOB_RANKFILE="/proc/nowhere"), address=None)
    with pytest.raises(UsageError, match="JSM_NAMESPACE_RANK=x is not a number"):
        found(4, 6, 1, JSM_NAMESPACE_RANK="x")
    script = env.require_detected(detect_by("lsf", job), **a_node(1, 0))
    assert "one of its 2 hosts; to use all: jsrun" in script.notes[0]
    del job["CSM_ALLOCATION_ID"]  # then the first line is a host like the rest
    script = env.require_detected(detect_by("lsf", job))
    assert "one of its 3 hosts" in script.notes[0]


def test_a_task_of_blaunch_is_a_node(hosts: Path) -> None:
    """blaunch numbers tasks, not hosts, so the host name decides."""
    own = os.uname().nodename
    hosts.write_text(f"h1\nh1\n{own}\n{own}\n")
    job = {"LSB_JOBID": "4711", "LSB_DJOB_RANKFILE": str(hosts), "LSF_PM_TASKID": "3"}
    expected = {"nnodes": 2, "node_rank": 1, "address": "h1", "run_id": "4711"}
    assert env.require_detected(detect_by("lsf", job), **expected).port
    hosts.write_text("h1\nh2\n")
    env.require_detected(detect_by("lsf", job), is_batch_script=True)


def test_a_task_of_pbsdsh_is_a_node(hosts: Path) -> None:
    hosts.write_text("n1.example.org\nn1.example.org\nn2.example.org\nn2.example.org\n")
    job = {"PBS_JOBID": "1234.server", "PBS_NODEFILE": str(hosts), "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}
    env.require_detected(detect_by("pbs", job), nnodes=1, node_rank=0, address=None, is_batch_script=True)
    for node, task in ("0", "2"), ("1", "1"):
        found = detect_by("pbs", {**job, "PBS_NODENUM": node, "PBS_TASKNUM": task})
        assert env.require_detected(found, nnodes=2, node_rank=int(node), address="n1.example.org").port
    with pytest.raises(UsageError, match="PBS_NODENUM=2 and hosts in PBS_NODEFILE=2 contradict"):
        detect_by("pbs", {**job, "PBS_NODENUM": "2"})


def test_a_host_file_that_is_not_a_regular_file(tmp_path: Path, hosts: Path) -> None:
    """Reading a FIFO would wait for its writer, and reading a device would not end."""
    os.mkfifo(tmp_path / "fifo")
    hosts.touch()
    os.truncate(hosts, 1 << 40)
    for odd, why in (
        (tmp_path / "fifo", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (hosts, "more than 16777216 bytes"),
    ):
        with pytest.raises(UsageError, match=f"{odd} cannot be read as a host file: {why}"):
            detect_by("pbs", {"PBS_JOBID": "1234.server", "PBS_NODEFILE": str(odd)})


def test_the_main_node_of_aws_finds_its_own_address_and_the_job_its_port() -> None:
    main, node = detect_by("awsbatch", env.AWS_BATCH_MAIN), detect_by("awsbatch", env.AWS_BATCH)
    assert main
    assert node
    assert main.node_rank == 0
    assert main.address in {*list_reachable_addresses(), None}, "None on a machine without a network"
    assert (main.port, main.run_id) == (node.port, node.run_id)
    assert main.run_id == "1c2f5a5e-6f0a-4f0e-a3f2-5b0d6b6b1f0e"


# --------------------------------------------------------------------------------------------- by the command itself


@pytest.mark.parametrize(
    ("environ", "lines", "typed"),
    [
        (
            env.CONDOR,
            [
                "Error: _CONDOR_PROCNO=1 of _CONDOR_NPROCS=2 nodes, but no variable has node 0's address",
                '  ddplaunch run --nnodes "$_CONDOR_NPROCS" --node-rank "$_CONDOR_PROCNO" --master-addr … on every '
                "node",
                "  or --cluster none …, for this machine alone",
            ],
            "--nnodes 2 --node-rank 1 --master-addr n1",
        ),
        (
            env.TORCH_NODE,
            [
                "Error: RANK=1 and WORLD_SIZE=2 without LOCAL_RANK: do they count nodes or processes?",
                '  nodes: ddplaunch run --nnodes "$WORLD_SIZE" --node-rank "$RANK" …; processes: set LOCAL_RANK in '
                "each",
                "  neither: ddplaunch run --cluster none …, for this machine alone",
            ],
            "--nnodes 2 --node-rank 1",
        ),
    ],
)
def test_a_refusal_has_the_command_to_type(run_in_fork, tmp_path, environ, lines, typed) -> None:
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", "train.py", env=environ)
    assert (done.returncode, done.stderr.splitlines()) == (2, lines)
    assert (
        "node rank: 1 (--node-rank)" in run_in_fork("run", "--dry-run", *typed.split(), "train.py", env=environ).stdout
    )
    alone = run_in_fork("run", "--dry-run", "--cluster", "none", "train.py", env=environ)
    assert (alone.returncode, "master address: 127.0.0.1" in alone.stdout) == (0, True)


SCRIPT = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "shared", "first", "second"),
    [
        (
            "runpod",
            {"WORLD_SIZE": "2", "NUM_NODES": "2", "NUM_TRAINERS": "1"},
            {"NODE_RANK": "0", "MASTER_ADDR": "localhost"},  # as the masters of some platforms do
            {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
        ),
        (
            "awsbatch",
            {**env.AWS_BATCH, "AWS_BATCH_JOB_NUM_NODES": "2"},
            {**env.AWS_BATCH_MAIN, "AWS_BATCH_JOB_NUM_NODES": "2"},
            {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"},
        ),
    ],
)
def test_two_machines_train_together(start_ddplaunch, tmp_path, name, shared, first, second) -> None:
    write_program(tmp_path, "train.py", SCRIPT)
    shared = {**shared, "MASTER_PORT": str(free_port())}
    nproc = ["--nproc", "1"] if name == "awsbatch" else []  # the others tell
    jobs = [
        start_ddplaunch("run", *nproc, "--start", "exec", "train.py", env={**shared, **node})
        for node in (first, second)
    ]
    assert [job.wait() for job in jobs] == [0, 0], "".join(job.stderr() for job in jobs)
    assert "rank 0 of 2" in jobs[0].stdout()
    assert "rank 1 of 2" in jobs[1].stdout()
    assert f"{name}: this is node 0 of 2" in jobs[0].stderr()
