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
from tests.system.clusters import recorded_environments as env

PBS, LSF, CONDOR_VARIABLES, TF_CONFIG = (env.ALONE[name] for name in ("pbs", "lsf", "htcondor", "tfconfig"))

RAY_TRAIN = {**env.TORCH, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", "ACCELERATE_TORCH_DEVICE": "cuda:1"}
"""A worker's, as python/ray/train/torch/config.py sets them: each worker is a rank."""

DAEMON = env.slurm_step("1(x2)", "n[1-2]", 2, 2, 1, 0, 1)
"""What mpirun's processes inherit: its daemon is one of a step of one task a node."""

TOGETHER = [
    ("torchelastic", {**env.SLURM_TASK, **env.TORCHRUN}),
    ("torchelastic", {**env.AZUREML, **env.TORCHRUN}),
    ("torch", {**env.openmpi(3, 4, 1, 2), **env.TORCH}),
    ("torch", {**env.AZUREML, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}),
    ("torch", {**env.SLURM_TASK, **env.TORCH}),
    ("slurm", {**env.SLURM_TASK, "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}),
    ("submitit", {**env.SLURM_TASK, **env.SUBMITIT}),
    ("slurm", {**env.SLURM_TASK, "SUBMITIT_EXECUTOR": "slurm"}),
    ("slurm", {**env.SLURM_TASK, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}),
    ("slurm", {**env.SLURM_TASK, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}),
    ("slurm", {**env.SLURM_TASK, **env.PALS}),
    ("openmpi", {**DAEMON, **env.openmpi(3, 4, 1, 2)}),
    ("openmpi", {**env.SLURM_BATCH, **env.openmpi(1, 4, 1, 2)}),
    ("mpich", {**DAEMON, **env.HYDRA}),
    ("mvapich", {**DAEMON, **env.mvapich("MV2", 3, 4, 1, 2)}),
    ("azureml", {**env.AZUREML_JOB, **env.openmpi(3, 4, 1, 2)}),
    ("openmpi", {**env.SAGEMAKER, **env.openmpi(3, 4, 1, 2)}),
    ("openmpi", {**env.SKYPILOT, **env.openmpi(3, 4, 1, 2)}),
    ("openmpi", {**LSF, **env.openmpi(3, 4, 1, 2)}),
    ("openmpi", {**PBS, **env.openmpi(3, 4, 1, 2)}),
    ("lsf", {**LSF, **env.JSRUN, **env.openmpi(1, 2, 1, 2)}),
    ("pals", {**PBS, **env.PALS}),
    ("flux", {**env.FLUX}),
    ("kubeflow", env.TRAINJOB),
    ("kubeflow", env.PYTORCHJOB),
    ("kubeflow", env.PYTORCHJOB_OLD),
    ("torchelastic", {**env.PYTORCHJOB, **env.TORCHRUN}),
    ("slurm", {**env.SLURM_TASK, **env.NNODES}),
    ("vertexai", {**env.VERTEX_AI, **env.PYTORCHJOB_OLD}),
    ("torchelastic", {**env.AWS_BATCH, **env.TORCHRUN}),
    ("openmpi", {**env.VOLCENGINE, **env.openmpi(3, 4, 1, 2)}),
    ("openmpi", {**CONDOR_VARIABLES, **env.openmpi(3, 4, 1, 2)}),
    ("volcengine", {**env.VOLCENGINE, **env.TORCH_NODE}),
    ("lepton", {**env.KUBERNETES, "JOB_COMPLETION_INDEX": "1", **env.LEPTON}),
    ("modelarts", {**env.KUBERNETES, **env.MODELARTS}),
    ("kubeflow", {**env.VOLCANO, **env.PYTORCHJOB_OLD}),
    ("torch", RAY_TRAIN),
    ("torchelastic", {**env.NUMBERED["runpod"], **env.TORCHRUN}),
    ("slurm", {**env.NUMBERED["runpod"], **env.SLURM_TASK}),
    ("vertexai", {**TF_CONFIG, **env.VERTEX_AI}),
    ("kubeflow", {**TF_CONFIG, **env.PYTORCHJOB_OLD}),
    ("leaderworkerset", {**env.NUMBERED["leaderworkerset"], "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4"}),
    ("nodes", {**env.NNODES, "JOB_COMPLETION_INDEX": "1"}),
    ("openmpi", {**env.AZURE_BATCH, **env.openmpi(3, 4, 1, 2)}),
    ("azureml", {**env.AZURE_BATCH, **env.AZUREML}),
]


@pytest.fixture(autouse=True)
def _rendezvous_of_determined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file names Determined's nodes."""
    (tmp_path / "rendezvous.json").write_text('{"container_addrs": ["10.0.0.4", "10.0.0.5"], "container_rank": 1}')
    monkeypatch.setattr(node_platforms, "RENDEZVOUS", str(tmp_path / "rendezvous.json"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_is_detected_by_its_own_variables(name: str) -> None:
    cluster_env = env.require_detected(detect(env.ALONE[name]), cluster=name)
    assert cluster_env.variables
    assert all(
        variable in env.ALONE[name] for variable in cluster_env.variables if variable != node_platforms.RENDEZVOUS
    )


@pytest.mark.parametrize(("name", "environ"), TOGETHER)
def test_the_more_specific_system_is_detected(name: str, environ: Mapping[str, str]) -> None:
    env.require_detected(detect(environ), cluster=name)


@pytest.mark.parametrize("environ_of_refused", [env.CONDOR, {**env.VOLCANO, "VC_MASTER_HOSTS": "job-master-0.job"}])
def test_what_a_script_has_set_goes_before_a_refusal(environ_of_refused: Mapping[str, str]) -> None:
    with pytest.raises(UsageError):
        detect(environ_of_refused)
    for name, environ in ("nodes", env.NNODES), ("openmpi", env.openmpi(3, 4, 1, 2)):
        env.require_detected(detect({**environ_of_refused, **environ}), cluster=name)


def test_under_mpirun_every_rank_of_a_node_has_the_same_procid() -> None:
    """The variables are those of four ranks on two nodes (Open MPI 4.1.4, Slurm 22.05); rank 0 is on the first."""
    for rank, local, node in (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1):
        daemon = env.slurm_step("1(x2)", "n[1-2]", 2, 2, node, 0, node)
        found = detect({**daemon, **env.openmpi(rank, 4, local, 2)})
        place = RankAssignment(rank, 4, local, 2)
        cluster_env = env.require_detected(found, rank_assignment=place, address="n1")
        assert "SLURM_JOB_NODELIST" in cluster_env.variables
        assert "--master-addr" in cluster_env.notes[-1]


def test_no_cluster_is_detected_without_variables() -> None:
    assert detect({}) is None
    assert detect({"PATH": "/usr/bin", "HOSTNAME": "n1", "SLURM_JOB_ID": "", "LOCAL_RANK": ""}) is None


def test_cluster_none_disables_detection() -> None:
    assert detect({**env.SLURM_TASK, "SLURM_PROCID": "x"}, "none") is None


def test_cluster_option_selects_the_system() -> None:
    found = detect({**DAEMON, **env.openmpi(3, 4, 1, 2)}, "slurm")
    env.require_detected(found, cluster="slurm", nnodes=2, node_rank=1, rank_assignment=None)


def test_a_cluster_that_is_not_here_names_its_sign() -> None:
    with pytest.raises(UsageError, match="--cluster slurm does not match this process: it needs SLURM_JOB_ID"):
        detect(env.OPENMPI_4, "slurm")


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


@pytest.mark.ci
def test_a_new_system_is_one_file(tmp_path: Path) -> None:
    (copy_package(tmp_path) / "system/clusters/systems/toy.py").write_text(TOY)
    here = {"TOY_NODES": "2", "TOY_NODE": "1"}
    words = ("run", "--dry-run", "--nproc", "1")
    assert "node rank: 1 (toy)" in run_copy(tmp_path, *words, "train.py", **here)
    assert ", toy, " in run_copy(tmp_path, *words, "--cluster", "x", "train.py", **here)
