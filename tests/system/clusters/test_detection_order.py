"""Tests of which system wins where several are detected, and of ``--cluster``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters import SYSTEMS, detect
from ddplaunch.system.clusters.cluster_env import RankAssignment
from ddplaunch.system.clusters.systems import node_platforms
from tests.package_copy import copy_package, run_copy
from tests.system.clusters.recorded_environments import (
    ALONE,
    AWS_BATCH,
    AZURE_BATCH,
    AZUREML,
    AZUREML_JOB,
    CONDOR,
    FLUX,
    HYDRA,
    JSRUN,
    KUBERNETES,
    LEPTON,
    MODELARTS,
    NNODES,
    NUMBERED,
    OPENMPI_4,
    PALS,
    PYTORCHJOB,
    PYTORCHJOB_OLD,
    SAGEMAKER,
    SKYPILOT,
    SLURM_BATCH,
    SLURM_TASK,
    SUBMITIT,
    TORCH,
    TORCH_NODE,
    TORCHRUN,
    TRAINJOB,
    VERTEX_AI,
    VOLCANO,
    VOLCENGINE,
    mvapich,
    openmpi,
    require_detected,
    slurm_step,
)

PBS, LSF, CONDOR_VARIABLES, TF_CONFIG = (ALONE[name] for name in ("pbs", "lsf", "htcondor", "tfconfig"))

RAY_TRAIN = {**TORCH, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", "ACCELERATE_TORCH_DEVICE": "cuda:1"}
"""A worker's, as python/ray/train/torch/config.py sets them: each worker is a rank."""

DAEMON = slurm_step("1(x2)", "n[1-2]", 2, 2, 1, 0, 1)
"""What mpirun's processes inherit: its daemon is one of a step of one task a node."""

TOGETHER = [
    ("torchelastic", {**SLURM_TASK, **TORCHRUN}),
    ("torchelastic", {**AZUREML, **TORCHRUN}),
    ("torch", {**openmpi(3, 4, 1, 2), **TORCH}),
    ("torch", {**AZUREML, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}),
    ("torch", {**SLURM_TASK, **TORCH}),
    ("slurm", {**SLURM_TASK, "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}),
    ("submitit", {**SLURM_TASK, **SUBMITIT}),
    ("slurm", {**SLURM_TASK, "SUBMITIT_EXECUTOR": "slurm"}),
    ("slurm", {**SLURM_TASK, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}),
    ("slurm", {**SLURM_TASK, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}),
    ("slurm", {**SLURM_TASK, **PALS}),
    ("openmpi", {**DAEMON, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**SLURM_BATCH, **openmpi(1, 4, 1, 2)}),
    ("mpich", {**DAEMON, **HYDRA}),
    ("mvapich", {**DAEMON, **mvapich("MV2", 3, 4, 1, 2)}),
    ("azureml", {**AZUREML_JOB, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**SAGEMAKER, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**SKYPILOT, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**LSF, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**PBS, **openmpi(3, 4, 1, 2)}),
    ("lsf", {**LSF, **JSRUN, **openmpi(1, 2, 1, 2)}),
    ("pals", {**PBS, **PALS}),
    ("flux", {**FLUX}),
    ("kubeflow", TRAINJOB),
    ("kubeflow", PYTORCHJOB),
    ("kubeflow", PYTORCHJOB_OLD),
    ("torchelastic", {**PYTORCHJOB, **TORCHRUN}),
    ("slurm", {**SLURM_TASK, **NNODES}),
    ("vertexai", {**VERTEX_AI, **PYTORCHJOB_OLD}),
    ("torchelastic", {**AWS_BATCH, **TORCHRUN}),
    ("openmpi", {**VOLCENGINE, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**CONDOR_VARIABLES, **openmpi(3, 4, 1, 2)}),
    ("volcengine", {**VOLCENGINE, **TORCH_NODE}),
    ("lepton", {**KUBERNETES, "JOB_COMPLETION_INDEX": "1", **LEPTON}),
    ("modelarts", {**KUBERNETES, **MODELARTS}),
    ("kubeflow", {**VOLCANO, **PYTORCHJOB_OLD}),
    ("torch", RAY_TRAIN),
    ("torchelastic", {**NUMBERED["runpod"], **TORCHRUN}),
    ("slurm", {**NUMBERED["runpod"], **SLURM_TASK}),
    ("vertexai", {**TF_CONFIG, **VERTEX_AI}),
    ("kubeflow", {**TF_CONFIG, **PYTORCHJOB_OLD}),
    ("leaderworkerset", {**NUMBERED["leaderworkerset"], "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4"}),
    ("nodes", {**NNODES, "JOB_COMPLETION_INDEX": "1"}),
    ("openmpi", {**AZURE_BATCH, **openmpi(3, 4, 1, 2)}),
    ("azureml", {**AZURE_BATCH, **AZUREML}),
]


@pytest.fixture(autouse=True)
def _rendezvous_of_determined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file names Determined's nodes."""
    (tmp_path / "rendezvous.json").write_text('{"container_addrs": ["10.0.0.4", "10.0.0.5"], "container_rank": 1}')
    monkeypatch.setattr(node_platforms, "RENDEZVOUS", str(tmp_path / "rendezvous.json"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_is_detected_by_its_own_variables(name: str) -> None:
    cluster_env = require_detected(detect(ALONE[name]))
    assert cluster_env.cluster == name
    assert cluster_env.variables
    assert all(variable in ALONE[name] for variable in cluster_env.variables if variable != node_platforms.RENDEZVOUS)


@pytest.mark.parametrize(("name", "environ"), TOGETHER)
def test_the_more_specific_goes_first(name: str, environ: Mapping[str, str]) -> None:
    cluster_env = require_detected(detect(environ))
    assert cluster_env.cluster == name


@pytest.mark.parametrize("environ_of_refused", [CONDOR, {**VOLCANO, "VC_MASTER_HOSTS": "job-master-0.job"}])
def test_what_a_script_has_set_goes_before_a_refusal(environ_of_refused: Mapping[str, str]) -> None:
    with pytest.raises(UsageError):
        detect(environ_of_refused)
    for name, environ in ("nodes", NNODES), ("openmpi", openmpi(3, 4, 1, 2)):
        cluster_env = require_detected(detect({**environ_of_refused, **environ}))
        assert cluster_env.cluster == name


def test_under_mpirun_every_rank_of_a_node_has_the_same_procid() -> None:
    """Four ranks on two nodes of an allocation, as by Open MPI 4.1.4 on Slurm 22.05; rank 0 is on the first node."""
    for rank, local, node in (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1):
        daemon = slurm_step("1(x2)", "n[1-2]", 2, 2, node, 0, node)
        cluster_env = require_detected(detect({**daemon, **openmpi(rank, 4, local, 2)}))
        assert cluster_env.rank_assignment == RankAssignment(rank, 4, local, 2)
        assert cluster_env.address == "n1"
        assert "SLURM_JOB_NODELIST" in cluster_env.variables
        assert "--master-addr" in cluster_env.notes[-1]


def test_nothing_here() -> None:
    assert detect({}) is None
    assert detect({"PATH": "/usr/bin", "HOSTNAME": "n1", "SLURM_JOB_ID": "", "LOCAL_RANK": ""}) is None


def test_cluster_none_disables_detection() -> None:
    assert detect({**SLURM_TASK, "SLURM_PROCID": "x"}, "none") is None


def test_cluster_option_selects_the_system() -> None:
    cluster_env = require_detected(detect({**DAEMON, **openmpi(3, 4, 1, 2)}, "slurm"))
    assert (cluster_env.cluster, cluster_env.nnodes, cluster_env.node_rank, cluster_env.rank_assignment) == (
        "slurm",
        2,
        1,
        None,
    )


def test_a_cluster_that_is_not_here_names_its_sign() -> None:
    with pytest.raises(UsageError, match="--cluster slurm does not match this process: it needs SLURM_JOB_ID"):
        detect(OPENMPI_4, "slurm")


def test_a_cluster_that_is_unknown() -> None:
    with pytest.raises(UsageError, match="unknown --cluster slrum") as raised:
        detect({}, "slrum")
    assert "known: torchelastic, " in raised.value.message
    assert raised.value.message.endswith(", none")


TOY = """
from ddplaunch.system.clusters.cluster_env import ClusterEnv, DetectionPriority, register_system


@register_system("toy", "TOY_NODES", priority=DetectionPriority.NODE)
def toy(environ):
    return ClusterEnv("toy", ("TOY_NODES",), int(environ["TOY_NODES"]), int(environ["TOY_NODE"]), address="n1")
"""


@pytest.mark.slow
def test_a_new_system_is_one_file(tmp_path: Path) -> None:
    (copy_package(tmp_path) / "system/clusters/systems/toy.py").write_text(TOY)
    here = {"TOY_NODES": "2", "TOY_NODE": "1"}
    words = ("run", "--dry-run", "--nproc", "1")
    assert "node rank: 1 (toy)" in run_copy(tmp_path, *words, "train.py", **here)
    assert ", toy, " in run_copy(tmp_path, *words, "--cluster", "x", "train.py", **here)
