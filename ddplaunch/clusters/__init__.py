"""What the surroundings say about this process: a short file or a row per system, and ``find`` over all of them.

Variables in, facts out: no scheduler is asked. Some systems give a file of hosts, which is read; some launchers of MPI
are asked about hosts, on the way that they give their processes.
The caller decides what to do with a finding, and which options override it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from ddplaunch import TYPE_CHECKING
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from typing import Any

    from ddplaunch.clusters.finding import Allocator, Finding

__all__ = ["NAMES", "NONE", "find", "sign", "system"]

_NUMBERED = {
    "dstack": ("DSTACK_NODES_NUM",),
    "runpod": ("NUM_TRAINERS",),
    "beaker": ("BEAKER_REPLICA_COUNT",),
    "leaderworkerset": ("LWS_GROUP_SIZE",),
    "ngc": ("NGC_ARRAY_SIZE",),
}
"""The rows of numbered.py."""

_HOSTFILES = {"cobalt": ("COBALT_NODEFILE",), "oar": ("OAR_NODEFILE",), "pjm": ("PJM_O_NODEINF",)}
"""The rows of hostfile.py."""

_SIGNS = {
    # Who numbered this very process. torch's variables come last in a chain of launchers, so they are read first;
    # Azure's of one process a node look like them and mean a node.
    "torchelastic": ("TORCHELASTIC_RUN_ID",),
    "azureml": ("AZUREML_EXPERIMENT_ID",),
    "torch": ("LOCAL_RANK",),
    "submitit": ("SUBMITIT_EXECUTOR",),
    # mpirun inside a Slurm allocation starts one daemon a node as a step, and all processes of a node have the
    # daemon's SLURM_PROCID.
    "openmpi": ("OMPI_COMM_WORLD_RANK",),
    "pals": ("PALS_LOCAL_RANKID",),
    "mpich": ("MPI_LOCALRANKID",),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
    "flux": ("FLUX_TASK_RANK",),
    "slurm": ("SLURM_JOB_ID",),
    # Who numbered the nodes.
    "skypilot": ("SKYPILOT_NODE_IPS",),
    "sagemaker": ("SM_HOSTS",),
    "vertexai": ("CLOUD_ML_JOB_ID",),
    "awsbatch": ("AWS_BATCH_JOB_NUM_NODES",),
    "volcengine": ("MLP_WORKER_NUM",),
    "lepton": ("LEPTON_JOB_TOTAL_WORKERS",),
    "modelarts": ("MA_NUM_HOSTS",),
    "determined": ("DET_ALLOCATION_ID",),
    **_NUMBERED,
    # RANK and WORLD_SIZE count nodes there, unless PET_NNODES says more.
    "kubeflow": ("PET_NNODES", "KUBERNETES_SERVICE_HOST"),
    "pai": ("NPROC_PER_NODE",),
    "nodes": ("NNODES", "NUM_NODES", "NODE_COUNT"),
    "tfconfig": ("TF_CONFIG", "CLUSTER_SPEC"),
    # These may refuse to tell; what a script has set then says more.
    "openpai": ("PAI_CURRENT_TASK_ROLE_NAME",),
    "volcano": ("VC_TASK_INDEX", "VK_TASK_INDEX"),
    "htcondor": ("_CONDOR_NPROCS",),
    "kubernetes": ("JOB_COMPLETION_INDEX",),
    "gcpbatch": ("BATCH_TASK_INDEX",),
    "nomad": ("NOMAD_ALLOC_INDEX",),
    # Who gave the hosts; jsrun among them, which Open MPI and others leave to it.
    "lsf": ("LSB_JOBID", "JSM_NAMESPACE_RANK"),
    "pbs": ("PBS_JOBID",),
    "sge": ("PE_HOSTFILE", "JOB_SCRIPT"),
    "azurebatch": ("AZ_BATCH_HOST_LIST",),
    **_HOSTFILES,
}
"""The systems in the order in which they are asked, the more specific first, and the variables one of which each has.

Only the files of those that show a sign are imported.
"""

NAMES = tuple(_SIGNS)

NONE = "none"  # what `--cluster` calls looking at nothing
_ALLOCATORS = ("slurm", "pbs", "lsf", "sge", "azurebatch", *_HOSTFILES)


def find(environ: Mapping[str, str], only: str | None = None) -> Finding | None:
    """Return what the first system that knows this process says about it, None if no system does.

    A batch system that only recognises a job's script comes last: variables set in that script say more.
    ``only`` is the one system to ask, or "none".

    Raises UsageError if ``only`` is unknown or does not run here; a variable is not a number or contradicts another;
    torch's variables are set, and nothing says whether they count nodes or processes.
    """
    if only == NONE:
        return None
    if only is not None and only not in _SIGNS:
        raise UsageError(f"unknown --cluster {only}; known: {', '.join((*NAMES, NONE))}")
    script: Finding | None = None
    for name in NAMES if only is None else (only,):
        if _shows(name, environ):
            finding = system(name).find(environ)
            if finding and not finding.is_script:
                return _completed(finding, environ)
            script = script or finding
    if only is None and environ.get("RANK"):
        from ddplaunch.clusters.torch import check_unclear

        check_unclear(environ)
    if script:
        return _completed(script, environ)
    if only is not None:
        what = f"--cluster {only} does not match this process: it needs {' or '.join(_SIGNS[only])}"
        raise UsageError(what, "leave --cluster out to detect the system")
    return None


def sign(environ: Mapping[str, str]) -> str | None:
    """Name a variable that shows that a system started this process, or one above it; in doubt it did."""
    return next((name for names in _SIGNS.values() for name in names if environ.get(name)), None)


def system(name: str) -> Allocator:
    """The file or the row of a system; only that of a batch system knows an allocation."""
    if name in _NUMBERED or name in _HOSTFILES:
        from ddplaunch.clusters import hostfile, numbered

        found: Any = numbered.ROWS.get(name) or hostfile.ROWS[name]
    else:
        found = import_module(f"ddplaunch.clusters.{name}")
    known: Allocator = found
    return known


def _shows(name: str, environ: Mapping[str, str]) -> bool:
    return any(environ.get(sign) for sign in _SIGNS[name])


def _completed(finding: Finding, environ: Mapping[str, str]) -> Finding:
    """Add what the batch system knows and the launcher inside it does not: where node 0 is, and a port for the job.

    MPI's launchers number processes and say nothing about hosts; by default they fill those of the allocation in its
    order, so that rank 0 is on the first.
    """
    from ddplaunch.clusters.reading import job_port
    from ddplaunch.dataclass import replace

    if finding.nnodes == 1 and not finding.place:
        return finding
    for name in _ALLOCATORS:
        given = system(name).allocation(environ) if _shows(name, environ) else None
        if given:
            if finding.port is None:
                finding = replace(finding, port=job_port(given.job))
            if finding.address is None and given.hosts:
                first = given.hosts[0]
                note = f"rank 0 is expected on {first}, the first of {given.variable}; --master-addr says otherwise"
                variables = (*finding.variables, given.variable)
                finding = replace(finding, address=first, variables=variables, notes=(*finding.notes, note))
            break
    return finding
