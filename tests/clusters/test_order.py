"""Who goes before whom where several systems show, and what ``--cluster`` does about it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddplaunch.clusters import NAMES, determined, find, system
from ddplaunch.clusters.finding import Place
from ddplaunch.errors import UsageError
from tests.clusters import (
    test_awsbatch,
    test_azurebatch,
    test_azureml,
    test_determined,
    test_flux,
    test_gcpbatch,
    test_htcondor,
    test_kubernetes,
    test_lepton,
    test_modelarts,
    test_mpich,
    test_mvapich,
    test_numbered,
    test_openpai,
    test_pals,
    test_sagemaker,
    test_skypilot,
    test_submitit,
    test_tfconfig,
    test_torch,
    test_volcano,
    test_volcengine,
)
from tests.clusters.samples import (
    KUBERNETES,
    NNODES,
    OPENMPI_4,
    PAI,
    PYTORCHJOB,
    PYTORCHJOB_OLD,
    SLURM_BATCH,
    SLURM_TASK,
    TORCH_NODE,
    TORCHRUN,
    TRAINJOB,
    VERTEX_AI,
    openmpi,
    slurm_step,
)

HYDRA = test_mpich.TASK
PBS = {"PBS_JOBID": "1234.server", "PBS_NODEFILE": "/proc/nowhere"}
LSF = {"LSB_JOBID": "4711", "LSB_DJOB_RANKFILE": "/proc/nowhere"}
SGE = {"JOB_ID": "4711", "PE_HOSTFILE": "/proc/nowhere"}
JSRUN = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"}

RAY_TRAIN = {**test_torch.LEAST, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", "ACCELERATE_TORCH_DEVICE": "cuda:1"}
"""A worker's, as python/ray/train/torch/config.py sets them: each worker is a rank."""

DAEMON = slurm_step("1(x2)", "n[1-2]", 2, 2, 1, 0, 1)
"""What mpirun's processes inherit: its daemon is one of a step of one task a node."""

ALONE = {
    "torchelastic": TORCHRUN,
    "azureml": test_azureml.NODE,
    "torch": test_torch.LEAST,
    "submitit": test_submitit.TASK,
    "openmpi": OPENMPI_4,
    "pals": test_pals.TASK,
    "mpich": HYDRA,
    "mvapich": test_mvapich.task("MV2", 3, 4, 1, 2),
    "flux": test_flux.TASK,
    "slurm": SLURM_TASK,
    "skypilot": test_skypilot.NODE,
    "sagemaker": test_sagemaker.HOST,
    "vertexai": VERTEX_AI,
    "awsbatch": test_awsbatch.NODE,
    "volcengine": test_volcengine.NODE,
    "lepton": test_lepton.NODE,
    "modelarts": test_modelarts.NODE,
    "determined": test_determined.TRIAL,
    **test_numbered.NODES,
    "kubeflow": TRAINJOB,
    "pai": PAI,
    "nodes": NNODES,
    "tfconfig": test_tfconfig.NODE,
    "openpai": test_openpai.TASK,
    "volcano": test_volcano.POD,
    "htcondor": test_htcondor.TOLD,
    "kubernetes": test_kubernetes.POD,
    "gcpbatch": test_gcpbatch.TASK,
    "nomad": {"NOMAD_ALLOC_INDEX": "1"},
    "lsf": LSF,
    "pbs": PBS,
    "sge": SGE,
    "azurebatch": test_azurebatch.TASK,
    "cobalt": {"COBALT_JOBID": "4711", "COBALT_NODEFILE": "/proc/nowhere"},
    "oar": {"OAR_JOB_ID": "4711", "OAR_NODEFILE": "/proc/nowhere"},
    "pjm": {"PJM_JOBID": "4711", "PJM_O_NODEINF": "/proc/nowhere"},
}

TOGETHER = [
    ("torchelastic", {**SLURM_TASK, **TORCHRUN}),
    ("torchelastic", {**test_azureml.NODE, **TORCHRUN}),
    ("torch", {**openmpi(3, 4, 1, 2), **test_torch.LEAST}),
    ("torch", {**test_azureml.NODE, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}),
    ("torch", {**SLURM_TASK, **test_torch.LEAST}),
    ("slurm", {**SLURM_TASK, "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}),
    ("submitit", {**SLURM_TASK, **test_submitit.TASK}),
    ("slurm", {**SLURM_TASK, "SUBMITIT_EXECUTOR": "slurm"}),
    ("slurm", {**SLURM_TASK, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}),
    ("slurm", {**SLURM_TASK, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}),
    ("slurm", {**SLURM_TASK, **test_pals.TASK}),
    ("openmpi", {**DAEMON, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**SLURM_BATCH, **openmpi(1, 4, 1, 2)}),
    ("mpich", {**DAEMON, **HYDRA}),
    ("mvapich", {**DAEMON, **test_mvapich.task("MV2", 3, 4, 1, 2)}),
    ("azureml", {**test_azureml.JOB, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**test_sagemaker.HOST, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**test_skypilot.NODE, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**LSF, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**PBS, **openmpi(3, 4, 1, 2)}),
    ("lsf", {**LSF, **JSRUN, **openmpi(1, 2, 1, 2)}),
    ("pals", {**PBS, **test_pals.TASK}),
    ("flux", {**test_flux.TASK}),
    ("kubeflow", TRAINJOB),
    ("kubeflow", PYTORCHJOB),
    ("kubeflow", PYTORCHJOB_OLD),
    ("torchelastic", {**PYTORCHJOB, **TORCHRUN}),
    ("slurm", {**SLURM_TASK, **NNODES}),
    ("vertexai", {**VERTEX_AI, **PYTORCHJOB_OLD}),
    ("torchelastic", {**test_awsbatch.NODE, **TORCHRUN}),
    ("openmpi", {**test_volcengine.NODE, **openmpi(3, 4, 1, 2)}),
    ("openmpi", {**test_htcondor.TOLD, **openmpi(3, 4, 1, 2)}),
    ("volcengine", {**test_volcengine.NODE, **TORCH_NODE}),
    ("lepton", {**KUBERNETES, "JOB_COMPLETION_INDEX": "1", **test_lepton.NODE}),
    ("modelarts", {**KUBERNETES, **test_modelarts.NODE}),
    ("kubeflow", {**test_volcano.POD, **PYTORCHJOB_OLD}),
    ("torch", RAY_TRAIN),
    ("torchelastic", {**test_numbered.NODES["runpod"], **TORCHRUN}),
    ("slurm", {**test_numbered.NODES["runpod"], **SLURM_TASK}),
    ("vertexai", {**test_tfconfig.NODE, **VERTEX_AI}),
    ("kubeflow", {**test_tfconfig.NODE, **PYTORCHJOB_OLD}),
    ("leaderworkerset", {**test_numbered.NODES["leaderworkerset"], "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4"}),
    ("nodes", {**NNODES, "JOB_COMPLETION_INDEX": "1"}),
    ("openmpi", {**test_azurebatch.TASK, **openmpi(3, 4, 1, 2)}),
    ("azureml", {**test_azurebatch.TASK, **test_azureml.NODE}),
]


@pytest.fixture(autouse=True)
def _rendezvous_of_determined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells Determined's nodes is a file."""
    (tmp_path / "rendezvous.json").write_text('{"container_addrs": ["10.0.0.4", "10.0.0.5"], "container_rank": 1}')
    monkeypatch.setattr(determined, "FILE", str(tmp_path / "rendezvous.json"))


@pytest.mark.parametrize("name", NAMES)
def test_each_alone(name: str) -> None:
    finding = find(ALONE[name])
    assert finding
    assert finding.cluster == name
    assert finding.variables
    assert all(variable in ALONE[name] for variable in finding.variables if variable != determined.FILE)


@pytest.mark.parametrize("name", NAMES)
def test_a_sign_is_all_that_a_file_needs_to_be_asked(name: str) -> None:
    """Whatever a file finds in any of these environments, ``find`` finds when only that file is asked."""
    for environ in [*ALONE.values(), *(environ for _, environ in TOGETHER)]:
        found = system(name).find(environ)
        if found:
            assert find(environ, name)


@pytest.mark.parametrize(("name", "environ"), TOGETHER)
def test_the_more_specific_goes_first(name: str, environ: Mapping[str, str]) -> None:
    finding = find(environ)
    assert finding
    assert finding.cluster == name


@pytest.mark.parametrize("refused", [test_htcondor.NODE, {**test_volcano.POD, "VC_MASTER_HOSTS": "job-master-0.job"}])
def test_what_a_script_has_set_is_heard_before_a_system_refuses(refused: Mapping[str, str]) -> None:
    with pytest.raises(UsageError):
        find(refused)
    for name, environ in ("nodes", NNODES), ("openmpi", openmpi(3, 4, 1, 2)):
        finding = find({**refused, **environ})
        assert finding
        assert finding.cluster == name


def test_under_mpirun_every_rank_of_a_node_has_the_same_procid() -> None:
    """Four ranks on two nodes of an allocation, told by Open MPI 4.1.4 on Slurm 22.05; rank 0 is on the first node."""
    for rank, local, node in (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1):
        daemon = slurm_step("1(x2)", "n[1-2]", 2, 2, node, 0, node)
        finding = find({**daemon, **openmpi(rank, 4, local, 2)})
        assert finding
        assert finding.place == Place(rank, 4, local, 2)
        assert finding.address == "n1"
        assert "SLURM_JOB_NODELIST" in finding.variables
        assert "--master-addr" in finding.notes[-1]


def test_mpirun_takes_address_and_port_from_the_allocation(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("n1\nn1\nn2\nn2\n")
    finding = find({**PBS, "PBS_NODEFILE": str(nodefile), **HYDRA})
    assert finding
    assert (finding.cluster, finding.address) == ("mpich", "n1")
    assert finding.port
    assert finding.variables[-1] == "PBS_NODEFILE"


def test_nothing_here() -> None:
    assert find({}) is None
    assert find({"PATH": "/usr/bin", "HOSTNAME": "n1", "SLURM_JOB_ID": "", "LOCAL_RANK": ""}) is None


def test_cluster_none_looks_at_nothing() -> None:
    assert find({**SLURM_TASK, "SLURM_PROCID": "x"}, "none") is None


def test_cluster_names_the_one_to_ask() -> None:
    finding = find({**DAEMON, **openmpi(3, 4, 1, 2)}, "slurm")
    assert finding
    assert (finding.cluster, finding.nnodes, finding.node_rank, finding.place) == ("slurm", 2, 1, None)


def test_a_cluster_that_is_not_here_names_its_sign() -> None:
    with pytest.raises(UsageError, match="--cluster slurm does not match this process: it needs SLURM_JOB_ID"):
        find(OPENMPI_4, "slurm")


def test_a_cluster_that_is_unknown() -> None:
    with pytest.raises(UsageError, match="unknown --cluster slrum") as raised:
        find({}, "slrum")
    assert "known: torchelastic, " in raised.value.message
    assert raised.value.message.endswith(", none")


def test_a_look_at_nothing_imports_nothing() -> None:
    program = "import sys; from ddplaunch import clusters; clusters.find({}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("ddplaunch.")}
    assert loaded == {"ddplaunch.clusters", "ddplaunch.errors"}
