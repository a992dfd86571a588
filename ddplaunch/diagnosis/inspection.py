"""What was found when ranks were asked where they stand: their processes, stacks and collectives. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from itertools import accumulate
from typing import Any

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import (
        Count,
        ExitStatus,
        MicrosecondGaps,
        Name,
        NonNegativeFloat,
        Number,
        Pid,
        Size,
        TextLine,
        Timestamp,
    )


class Detail(Enum):
    """How closely ranks are looked at; each but the last has what those before it have."""

    STATE = "state"  # the kernel's word and the collectives: a millisecond for a rank
    STACKS = "stacks"
    WAITS = "waits"  # the collectives twice, a tenth of a second apart, and the last ones of those who wait
    LATENESS = "pace"  # who is slow, by when each arrived at its last collectives: up to 0.4 s of each rank


class ProcessCondition(Enum):
    """What the kernel says of a rank's process."""

    ALIVE = "alive"
    STOPPED = "stopped"  # by SIGSTOP, Ctrl-Z or a debugger
    BLOCKED = "blocked"  # in uninterruptible sleep: it waits for a disk or a driver
    ENDING = "ending"  # its program is over, and Python takes down what it left
    EXITED = "exited"
    REPLACED = "replaced"  # by another program, which the rank has executed
    PENDING = "pending"  # it has no process yet


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    function: TextLine
    file: TextLine  # relative to the job's folder where it is below it
    line: Number
    own: bool  # whether it is the user's code, and neither Python's own nor an installed package's


@dataclass(frozen=True)
class Thread:
    """One thread of a rank, or a task of asyncio that waits."""

    frames: tuple[Frame, ...]  # the innermost first
    name: TextLine = ""  # where Python tells it (3.14); "task Task-2" of a task

    @property
    def title(self) -> str:
        """Say for people what it is: "thread feeder", "task Task-2"."""
        return self.name if self.name.startswith("task ") else f"thread {self.name}".rstrip()


@dataclass(frozen=True)
class Worker:
    """A child process that a rank waits for: a worker of its DataLoader, or one that multiprocessing has started."""

    pid: Pid
    frames: tuple[Frame, ...] = ()  # of its main thread, from the function that runs it on; the innermost first
    code: ExitStatus | None = None  # how it ended: -N for signal N
    stopped: bool = False  # by SIGSTOP or a debugger; then it has no frames


@dataclass(frozen=True)
class GroupState:
    """How far a rank is in a process group, in torch's own count, which on gloo has send and recv in it."""

    group: TextLine  # torch's name of the group: "0" is the default one
    enqueued: Number  # the operation that it entered last, from 1
    completed: Number  # the last that has completed


@dataclass(frozen=True)
class Group:
    """A process group as one of its members knows it."""

    group: TextLine
    description: TextLine  # "default_pg", or what the program called it
    ranks: tuple[Count, ...]  # its members; none where it is not known


@dataclass(frozen=True)
class Collective:
    """The collective that a rank entered last in a process group."""

    group: TextLine
    number: Number  # from 1, in its group
    operation: TextLine  # "all_reduce"
    tensors: TextLine  # what goes in: "float32[6]", "float32[2, 3], int64[1]"; "" for none
    timeout: NonNegativeFloat  # seconds
    entered: Timestamp  # seconds since the epoch, by the clock of the rank's host
    completed: bool
    alone: bool  # whether no send or recv was counted with it: then ``GroupState`` has the same numbers


@dataclass(frozen=True)
class ActiveCall:
    """A function of torch.distributed that a rank is in, as it says itself."""

    function: TextLine  # the one that the user or a library called: "broadcast_object_list"
    operation: TextLine  # what that has called in turn: "broadcast"
    names: Count | None  # the rank that the operation names: whom it sends to or receives from, or the root
    members: tuple[Count, ...] = ()  # of the group that it makes, or in which it waits; none for all ranks


@dataclass(frozen=True)
class CollectiveArrivals:
    """When a rank arrived at consecutive collectives of a process group."""

    rank: Count
    group: TextLine  # torch's name of the group, one in a job: "0" is the default one
    description: TextLine  # "default_pg", "mesh_dp", or "undefined"
    number: Size  # of the first collective, counted in the group
    began: Timestamp  # seconds since the epoch, when the rank arrived at it, by the clock of its host
    gaps: MicrosecondGaps  # microseconds from each arrival to the next

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """The numbers of the collectives, and seconds since the epoch."""
        for number, elapsed in enumerate(accumulate(self.gaps, initial=0), self.number):
            yield number, self.began + elapsed / 1e6


@dataclass(frozen=True)
class RankInspection:
    """What one rank was found doing."""

    rank: Count
    host: Name
    pid: Pid
    condition: ProcessCondition
    code: ExitStatus | None = None  # how it ended: -N for signal N
    ended: Timestamp | None = None  # when it was seen to be gone; seconds since the epoch
    threads: tuple[Thread, ...] = ()  # the main one first; none where ``no_stack`` says why, or not asked for
    no_stack: TextLine = ""  # "it is not a Python program"
    workers: tuple[Worker, ...] = ()  # where it waits for its DataLoader
    answers: bool | None = None  # whether it said how far it is, None where it has no process group or was not asked
    groups: tuple[GroupState, ...] = ()
    moved: bool = False  # whether ``groups`` changed within a tenth of a second
    last: tuple[Collective, ...] = ()  # in each group the last, before it the oldest not complete; only where asked for
    known: tuple[Group, ...] = ()  # the groups that it is in; of the same ranks
    inside: ActiveCall | None = None  # where it is in such a function, and said so
    cpu: NonNegativeFloat = 0.0  # seconds of CPU time that it and its children have used
    arrivals: tuple[CollectiveArrivals, ...] = ()  # on the way to node 0
    quiet: NonNegativeFloat | None = (
        None  # seconds since it printed something; as the next four, None where it is not known
    )
    standstill: NonNegativeFloat | None = None  # seconds for which it has entered and completed no collective
    busy: NonNegativeFloat | None = None  # CPUs that it and its descendants have used of late: 0.5 is half of one
    traffic: NonNegativeFloat | None = (
        None  # bytes a second that they have read and written of late, in files and pipes
    )
    network: NonNegativeFloat | None = None  # the same on connections that lead out of the job
    late: NonNegativeFloat | None = (
        None  # seconds by which it arrived last at collectives, in the mean; where that was asked
    )
    awaits: TextLine = ""  # what its main thread waits for on a connection: "store" is the job's, or "10.0.0.7:443"
    asleep: TextLine = ""  # the kernel's word for what its main thread sleeps in: "waits for a file lock", or "asleep"
    lock_holder: Count | None = None  # the rank that holds that lock


@dataclass(frozen=True)
class Inspection:
    """What all ranks were found doing at one moment."""

    moment: Timestamp  # seconds since the epoch
    ranks: tuple[RankInspection, ...]  # in order
    world_size: Count
    silent: tuple[TextLine, ...] = ()  # the nodes that did not answer: "node 2 (n2)"
    node_only: bool = False  # whether other nodes were not asked (--control none)
    pace: tuple[TextLine, ...] = ()  # who is slow, in sentences, where that was asked; none where no rank is

    @property
    def by_number(self) -> dict[int, RankInspection]:
        return {rank.rank: rank for rank in self.ranks}

    def to_json(self) -> dict[str, Any]:
        """Return the object that stacks.json holds."""
        return asdict(self, dict_factory=lambda fields: {k: v.value if isinstance(v, Enum) else v for k, v in fields})
