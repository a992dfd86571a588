"""What a system's variables say, and what the file of each system has; the caller decides what to do with a finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ddplaunch.dataclass import dataclass


@dataclass(frozen=True)
class Place:
    """Where one process stands if the system has started all of them; None is a local size that it does not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None


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
    place: Place | None = None
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


class System(Protocol):
    """What the file of each system has."""

    def find(self, environ: Mapping[str, str]) -> Finding | None:
        """Return what the system says about this process; None if it does not run it.

        Raises UsageError if a variable is missing, is not a number, or contradicts another.
        """


class Allocator(System, Protocol):
    """What the file of a batch system has besides."""

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return what it has given this job; None if it has given nothing."""
