"""What a system's variables say, and a system as we know it; the caller decides what to do with a cluster_env."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

from ddplaunch import TYPE_CHECKING
from ddplaunch.clusters.variables import EnvVariables
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    Ask = Callable[[EnvVariables], "ClusterEnv | None"]
    Allocate = Callable[[EnvVariables], "Allocation | None"]


@dataclass(frozen=True)
class RankAssignment:
    """Where one process stands if the system has started all of them; None is a local size that it does not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None


@dataclass(frozen=True)
class ClusterEnv:
    """Where this process stands in a job, as the system around it tells.

    Without a ``rank_assignment`` it is one node of the job and starts the node's processes; with one, the system has started
    every process already and this is one of them.

    ``nnodes`` and ``node_rank`` are None only beside a place, where the system does not say them: MPI's launchers
    number processes, not nodes, and dividing a rank by a local size is wrong wherever nodes differ or take turns.
    """

    cluster: str  # the system's name, for `--cluster` and for people
    variables: tuple[str, ...]  # what it was read from
    nnodes: int | None
    node_rank: int | None
    min_nodes: int | None = None  # of an elastic job; None if it always has all
    address: str | None = None  # node 0's; None if the system does not say
    address_may_be_unknown: bool = False
    """Whether the address is a name that comes with node 0's own start: not known yet, or still an earlier node 0's."""
    port: int | None = None
    """The system's own, or derived from the job's id; the next one is as free. None if there is neither."""
    run_id: str | None = None
    nproc: str | None = None  # processes a node as `--nproc` has it: "8", "auto"
    rank_assignment: RankAssignment | None = None
    is_batch_script: bool = False  # whether it is a batch job's own script: the system only says where it runs
    may_be_single: bool = (
        False  # whether it is one of many that the system numbers, and a job of its own as far as it says
    )
    notes: tuple[str, ...] = ()  # what people should know about it

    def __post_init__(self) -> None:
        assert self.rank_assignment or (self.nnodes is not None and self.node_rank is not None), self


@dataclass(frozen=True)
class Allocation:
    """What a batch system has given a job; it does not describe this process, which may be a script on the first host.

    ``job_id`` is the job's id; ``hosts`` in the system's order, each once, empty where they cannot be read here.
    """

    job_id: str
    hosts: tuple[str, ...]
    variable: str  # what the hosts were read from


class DetectionPriority(IntEnum):
    """When a system is asked: the more specific first."""

    RANK = 1  # it has numbered this very process
    STEP = 2  # so has Slurm; but mpirun inside an allocation starts one daemon a node as a step, and all processes of a
    # node have the daemon's SLURM_PROCID
    NODE = 3  # it has numbered the nodes, in variables of its own
    COMMON = 4  # it has numbered the nodes, in variables that people set too
    INDEX = 5  # it may refuse to tell how many there are; what a script has set then says more
    HOSTS = 6  # it has given the hosts


@dataclass(frozen=True)
class ClusterSystem:
    """One system that starts processes; it always sets one of the variables ``marker_variables``."""

    name: str
    marker_variables: tuple[str, ...]
    priority: DetectionPriority
    detector: Ask
    allocation_reader: Allocate | None = None
    has_shared_log: bool = (
        False  # whether one program (srun, mpirun, …) shows what all of its processes print, by default
    )

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return any(environ.get(sign) for sign in self.marker_variables)

    def detect(self, environ: Mapping[str, str]) -> ClusterEnv | None:
        """Return what the system says about this process; None if it does not run it.

        Raises UsageError if a variable is missing, is not a number, or contradicts another.
        """
        return self.detector(EnvVariables(environ)) if self.is_present(environ) else None

    def read_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return what a batch system has given this job; None if it has given nothing."""
        return (
            self.allocation_reader(EnvVariables(environ))
            if self.allocation_reader and self.is_present(environ)
            else None
        )


REGISTERED_SYSTEMS: list[ClusterSystem] = []
"""All systems whose files are loaded; those of one turn in the order in which they are asked."""


def register_system(
    name: str, *signs: str, priority: DetectionPriority, allocation: Allocate | None = None, one_log: bool = False
) -> Callable[[Ask], ClusterSystem]:
    """Make a function that reads a system's variables that system."""

    def made(ask: Ask) -> ClusterSystem:
        REGISTERED_SYSTEMS.append(ClusterSystem(name, signs, priority, ask, allocation, one_log))
        return REGISTERED_SYSTEMS[-1]

    return made
