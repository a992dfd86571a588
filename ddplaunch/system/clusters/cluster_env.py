"""The cluster environment of a process, a cluster system, and the registry of systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

from msgspec import Struct

from ddplaunch.system.clusters.env_variables import EnvVariables

Detector = Callable[[EnvVariables], "ClusterEnv | None"]
AllocationReader = Callable[[EnvVariables], "Allocation | None"]


class RankAssignment(Struct, frozen=True):
    """The rank of this process if the cluster system has started all ranks; a local size of None is unknown."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None


class ClusterEnv(Struct, frozen=True):
    """The place of this process in a job, according to the environment variables of its cluster system.

    Without a ``rank_assignment`` this process is one node of the job and starts the node's ranks. With one, the system
    has started all ranks, and this process is one of them.

    ``nnodes`` and ``node_rank`` may be None only with a ``rank_assignment``: MPI launchers number processes, not nodes,
    and dividing a rank by the local size is wrong if nodes differ or ranks are dealt in turns.
    """

    cluster: str  # the system's name, as in `--cluster`
    variables: tuple[str, ...]  # the names of the environment variables from which this was read
    nnodes: int | None
    node_rank: int | None
    min_nodes: int | None = None  # of an elastic job, else None
    address: str | None = None  # node 0's; None if the system does not supply it
    address_may_be_unknown: bool = False
    """Whether the address is a name that, until node 0 starts, does not resolve or resolves to an earlier node 0."""
    port: int | None = None
    """The port that the system supplies or that follows from the job id, else None; the port after it is free too."""
    run_id: str | None = None
    nproc: str | None = None  # processes per node, in the form of `--nproc`: "8", "auto"
    rank_assignment: RankAssignment | None = None
    is_batch_script: bool = False  # whether this is the batch script of a job: not a node of a ddplaunch job
    may_be_single: bool = False  # whether it is one of many numbered tasks that may each be a job of their own
    notes: tuple[str, ...] = ()  # for the user

    def __post_init__(self) -> None:
        assert self.rank_assignment or (self.nnodes is not None and self.node_rank is not None), self


class Allocation(Struct, frozen=True):
    """The hosts that a batch system has allocated to a job; says nothing about this process.

    ``hosts``: in the system's order, each once; empty if they cannot be read here.
    """

    job_id: str
    hosts: tuple[str, ...]
    variable: str  # the variable with the hosts


class DetectionPriority(IntEnum):
    """The order of detection: the most specific first."""

    RANK = 1  # the system numbers this very process
    STEP = 2  # so does Slurm; but mpirun in an allocation starts one daemon per node as a step, and all processes of a
    # node inherit the daemon's SLURM_PROCID
    NODE = 3  # it numbers the nodes, in variables of its own
    COMMON = 4  # it numbers the nodes, in variables that users set too
    INDEX = 5  # it numbers tasks, perhaps without their count; variables set by a script say more
    HOSTS = 6  # it supplies only the hosts


class ClusterSystem(Struct, frozen=True):
    """A cluster system, which starts processes and sets one of the ``marker_variables`` in each of them."""

    name: str
    marker_variables: tuple[str, ...]
    priority: DetectionPriority
    detector: Detector
    allocation_reader: AllocationReader | None = None
    has_shared_log: bool = False  # whether one program (srun, mpirun, …) prints the output of all processes by default

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return any(environ.get(sign) for sign in self.marker_variables)

    def detect(self, environ: Mapping[str, str]) -> ClusterEnv | None:
        """Return the cluster environment of this process; None if the system has not started it.

        Raises UsageError if a variable is missing, is not a number, or contradicts another.
        """
        return self.detector(EnvVariables(environ)) if self.is_present(environ) else None

    def read_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the allocation of a batch system, None if there is none."""
        reader = self.allocation_reader
        return reader(EnvVariables(environ)) if reader and self.is_present(environ) else None


REGISTERED_SYSTEMS: list[ClusterSystem] = []
"""All systems whose files are imported; those of equal priority in the order of detection."""


def register_system(
    name: str,
    *marker_variables: str,
    priority: DetectionPriority,
    allocation: AllocationReader | None = None,
    has_shared_log: bool = False,
) -> Callable[[Detector], ClusterSystem]:
    """Decorator: register a function that reads a system's variables as the detector of that system."""

    def register(detector: Detector) -> ClusterSystem:
        REGISTERED_SYSTEMS.append(ClusterSystem(name, marker_variables, priority, detector, allocation, has_shared_log))
        return REGISTERED_SYSTEMS[-1]

    return register
