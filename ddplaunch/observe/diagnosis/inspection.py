"""The result of inspecting ranks, as plain data: their processes, stacks and collectives at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import accumulate

from msgspec import Struct

from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.types import (
    Count,
    ExitStatus,
    JsonObject,
    MicrosecondGaps,
    Name,
    NonNegativeFloat,
    Number,
    Pid,
    Size,
    TextLine,
    Timestamp,
    as_dict,
)
from ddplaunch.core.control_socket.job_status import ProgramStatus


class Detail(Enum):
    """How detailed an inspection is; each level but the last includes those before it."""

    STATE = "state"  # the process state and the collectives: a millisecond for a rank
    STACKS = "stacks"
    WAITS = "waits"  # the collectives twice, 0.1 s apart, and the last collectives of the ranks that wait
    LATENESS = "pace"  # the arrivals at the last collectives, to find slow ranks: up to 0.4 s of each rank


class ProcessCondition(Enum):
    """The state of a rank's process, from the kernel."""

    ALIVE = "alive"
    STOPPED = "stopped"  # by SIGSTOP, Ctrl-Z or a debugger
    BLOCKED = "blocked"  # in uninterruptible sleep (state D): waits for a disk or a driver
    ENDING = "ending"  # the program has ended, and the interpreter is shutting down
    EXITED = "exited"
    REPLACED = "replaced"  # the rank has executed another program (execve)
    PENDING = "pending"  # no process yet


class Thread(Struct, frozen=True):
    """One thread of a rank, or a task of asyncio that waits."""

    frames: tuple[Frame, ...]  # the innermost first
    name: TextLine = ""  # from Python 3.14 on; "task Task-2" of a task

    @property
    def title(self) -> str:
        """A title for users: "thread feeder", "task Task-2"."""
        return self.name if self.name.startswith("task ") else f"thread {self.name}".rstrip()


class Worker(Struct, frozen=True):
    """A child process that a rank waits for: a DataLoader worker, or one started by multiprocessing."""

    pid: Pid
    frames: tuple[Frame, ...] = ()  # of its main thread, inside the function that runs it; the innermost first
    code: ExitStatus | None = None  # exit code, -N for signal N; None while it runs
    stopped: bool = False  # by SIGSTOP or a debugger; then it has no frames


class GroupState(Struct, frozen=True):
    """How far a rank is in a process group, in torch's own count, which on gloo includes send and recv."""

    group: TextLine  # torch's name of the group: "0" is the default one
    enqueued: Number  # the operation that it entered last, from 1
    completed: Number  # the last that has completed


class Group(Struct, frozen=True):
    """A process group, as reported by one of its members."""

    group: TextLine
    description: TextLine  # "default_pg", or the name that the program gave it
    ranks: tuple[Count, ...]  # its members; () if unknown


class Collective(Struct, frozen=True):
    """The collective that a rank entered last in a process group."""

    group: TextLine
    number: Number  # from 1, in its group
    operation: TextLine  # "all_reduce"
    tensors: TextLine  # the inputs: "float32[6]", "float32[2, 3], int64[1]"; "" for none
    timeout: NonNegativeFloat  # seconds
    entered: Timestamp  # seconds since the epoch, by the clock of the rank's host
    completed: bool
    alone: bool  # no send or recv is counted in ``number``: then ``GroupState`` has the same numbers


class ActiveCall(Struct, frozen=True):
    """A function of torch.distributed that a rank is in, as reported by the rank."""

    function: TextLine  # the one that the user or a library called: "broadcast_object_list"
    operation: TextLine  # what that function calls: "broadcast"
    names: Count | None  # the rank in its arguments: the peer of a send or recv, the root, its own
    members: tuple[Count, ...] = ()  # of the group that it creates or waits in; () for all ranks
    key: TextLine = ""  # of the store, if it waits for one: "epoch/1"; "" if unknown
    world_size: Count = 0  # the argument of ``init_process_group``; 0 if unknown


class CollectiveArrivals(Struct, frozen=True):
    """When a rank arrived at consecutive collectives of a process group."""

    rank: Count
    group: TextLine  # torch's name of the group, unique in a job: "0" is the default one
    description: TextLine  # "default_pg", "mesh_dp", or "undefined"
    number: Size  # the number of the first collective in its group
    began: Timestamp  # seconds since the epoch, when the rank arrived at it, by the clock of its host
    gaps: MicrosecondGaps  # microseconds from each arrival to the next

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the number of each collective and its arrival in seconds since the epoch."""
        for number, elapsed in enumerate(accumulate(self.gaps, initial=0), self.number):
            yield number, self.began + elapsed / 1e6


class RankInspection(Struct, frozen=True):
    """The state of one rank at the moment of an inspection."""

    rank: Count
    host: Name
    pid: Pid
    condition: ProcessCondition
    code: ExitStatus | None = None  # exit code, -N for signal N; None while it runs
    ended: Timestamp | None = None  # when its end was noticed; seconds since the epoch
    threads: tuple[Thread, ...] = ()  # the main one first; () if not requested, or ``no_stack`` has the reason
    no_stack: TextLine = ""  # "it is not a Python program"
    outside: TextLine = ""  # "between two calls", if its main thread is in none of the program's code, but will be
    workers: tuple[Worker, ...] = ()  # if it waits for child processes
    answers: bool | None = None  # it reported its collectives; None without process group, or not requested
    groups: tuple[GroupState, ...] = ()
    moved: bool = False  # whether ``groups`` changed within a tenth of a second
    last: tuple[Collective, ...] = ()  # in each group the oldest incomplete and the last one; if requested
    known: tuple[Group, ...] = ()  # the groups that it is in; if requested
    inside: ActiveCall | None = None  # the function of torch.distributed that it reports to be in
    cpu: NonNegativeFloat = 0.0  # CPU seconds of it and its children
    arrivals: tuple[CollectiveArrivals, ...] = ()  # only in messages to node 0
    # Recent activity of the rank and its descendants; None is unknown.
    quiet: NonNegativeFloat | None = None  # seconds since its last output, or its end
    standstill: NonNegativeFloat | None = None  # seconds since it entered or completed a collective
    busy: NonNegativeFloat | None = None  # CPUs: 0.5 is half of one
    traffic: NonNegativeFloat | None = None  # bytes a second, read and written in files and pipes
    network: NonNegativeFloat | None = None  # bytes a second on connections to hosts outside the job
    late: NonNegativeFloat | None = None  # mean seconds by which it arrived last at collectives; if requested
    awaits: TextLine = ""  # the peer that its main thread waits for: "store" (the job's), "10.0.0.7:443"
    asleep: TextLine = ""  # what its main thread sleeps in, from the kernel: "waits for a file lock", or "asleep"
    lock_holder: Count | None = None  # the rank that holds this file lock
    library: TextLine = ""  # "torchcomms", if it has no process group and this library, which keeps its own records
    thread_error: TextLine = ""  # "its thread feed had failed: OSError: …", by its output, if it waits for a thread


class ProgramInspection(ProgramStatus, frozen=True):
    """A program beside the ranks at the moment of an inspection; usage is that of all of its processes."""

    host: Name = ""
    cpu: NonNegativeFloat = 0.0  # CPU seconds
    memory: Size = 0  # bytes; 0 if it has no process
    last_line: TextLine = ""  # of its output
    # Set by a command that has inspected twice, or has asked the driver; None is unknown.
    busy: NonNegativeFloat | None = None  # CPUs
    gpu_busy: NonNegativeFloat | None = None  # percent, the mean of its GPUs


class Inspection(Struct, frozen=True):
    """The state of all inspected ranks at one moment."""

    moment: Timestamp  # seconds since the epoch
    ranks: tuple[RankInspection, ...]  # in order
    world_size: Count
    silent: tuple[TextLine, ...] = ()  # the nodes that did not reply: "node 2 (n2)"
    node_only: bool = False  # only this node's ranks (--control none)
    pace: tuple[TextLine, ...] = ()  # sentences on slow ranks, if requested; () if no rank is slow
    programs: tuple[ProgramInspection, ...] = ()  # beside the ranks

    @property
    def by_number(self) -> dict[int, RankInspection]:
        return {rank.rank: rank for rank in self.ranks}

    def to_json(self) -> JsonObject:
        """Return this inspection as a JSON object, as the file stacks.json holds it."""
        return as_dict(self)
