"""What a system's variables say, and a system as we know it; the caller decides what to do with a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

from ddplaunch import TYPE_CHECKING
from ddplaunch.clusters.variables import Variables
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    Ask = Callable[[Variables], "Finding | None"]
    Allocate = Callable[[Variables], "Allocation | None"]


@dataclass(frozen=True)
class RankPlace:
    """Where one process stands if the system has started all of them; None is a local size that it does not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None


@dataclass(frozen=True)
class Finding:
    """Where this process stands in a job, as the system around it tells.

    Without a ``place`` it is one node of the job and starts the node's processes; with one, the system has started
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
    address_comes_late: bool = False
    """Whether the address is a name that comes with node 0's own start: not known yet, or still an earlier node 0's."""
    port: int | None = None
    """The system's own, or derived from the job's id; the next one is as free. None if there is neither."""
    run_id: str | None = None
    nproc: str | None = None  # processes a node as `--nproc` has it: "8", "auto"
    place: RankPlace | None = None
    is_script: bool = False  # whether it is a batch job's own script: the system only says where it runs
    is_copy: bool = False  # whether it is one of many that the system numbers, and a job of its own as far as it says
    notes: tuple[str, ...] = ()  # what people should know about it

    def __post_init__(self) -> None:
        assert self.place or (self.nnodes is not None and self.node_rank is not None), self


@dataclass(frozen=True)
class Allocation:
    """What a batch system has given a job; it does not describe this process, which may be a script on the first host.

    ``job`` is the job's id; ``hosts`` in the system's order, each once, empty where they cannot be read here.
    """

    job: str
    hosts: tuple[str, ...]
    variable: str  # what the hosts were read from


class Turn(IntEnum):
    """When a system is asked: the more specific first."""

    RANK = 1  # it has numbered this very process
    STEP = 2  # so has Slurm; but mpirun inside an allocation starts one daemon a node as a step, and all processes of a
    # node have the daemon's SLURM_PROCID
    NODE = 3  # it has numbered the nodes, in variables of its own
    COMMON = 4  # it has numbered the nodes, in variables that people set too
    INDEX = 5  # it may refuse to tell how many there are; what a script has set then says more
    HOSTS = 6  # it has given the hosts


@dataclass(frozen=True)
class System:
    """One system that starts processes; it always sets one of the variables ``signs``."""

    name: str
    signs: tuple[str, ...]
    turn: Turn
    ask: Ask
    allocate: Allocate | None = None
    one_log: bool = False  # whether one program (srun, mpirun, …) shows what all of its processes print, by default

    def shows(self, environ: Mapping[str, str]) -> bool:
        return any(environ.get(sign) for sign in self.signs)

    def find(self, environ: Mapping[str, str]) -> Finding | None:
        """Return what the system says about this process; None if it does not run it.

        Raises UsageError if a variable is missing, is not a number, or contradicts another.
        """
        return self.ask(Variables(environ)) if self.shows(environ) else None

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return what a batch system has given this job; None if it has given nothing."""
        return self.allocate(Variables(environ)) if self.allocate and self.shows(environ) else None


KNOWN: list[System] = []
"""All systems whose files are loaded; those of one turn in the order in which they are asked."""


def system(
    name: str, *signs: str, turn: Turn, allocation: Allocate | None = None, one_log: bool = False
) -> Callable[[Ask], System]:
    """Make a function that reads a system's variables that system."""

    def made(ask: Ask) -> System:
        KNOWN.append(System(name, signs, turn, ask, allocation, one_log))
        return KNOWN[-1]

    return made
