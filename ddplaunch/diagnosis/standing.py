"""Where one rank stands: its line of the user's code, the torch function it is in, how far it is in a process group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from ddplaunch.diagnosis.inspection import Collective, Frame, ProcessCondition, RankInspection, Thread, Worker
from ddplaunch.words import signal_name

INIT_FUNCTION = "init_process_group"
SEND_FUNCTIONS = {"isend", "send", "send_object_list"}
RECEIVE_FUNCTIONS = {"irecv", "recv", "recv_object_list"}
WORK_WAIT = "the wait() of isend or irecv"
POINT_TO_POINT_FUNCTIONS = {"batch_isend_irecv", WORK_WAIT, *SEND_FUNCTIONS, *RECEIVE_FUNCTIONS}
ROOTED_FUNCTIONS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
"""Collectives with a root, which all ranks must name alike, and how it is said of them."""

STORE_WAIT = "store.wait"
FILE_LOCK = "flock"
NEW_GROUP = "new_group"
UNRECORDED_FUNCTIONS = POINT_TO_POINT_FUNCTIONS | {
    INIT_FUNCTION,
    STORE_WAIT,
    FILE_LOCK,
    NEW_GROUP,
    "destroy_process_group",
    "monitored_barrier",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
"""Functions of torch.distributed that wait for other ranks and that the flight recorder of gloo has not."""

PACKAGE_PATH = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+t?)/")
"""What stands before a library's own name in the name of a file."""

_C10D = "torch/distributed/distributed_c10d.py"
_PACKING = {"_object_to_tensor", "_tensor_to_object"}
"""What turns objects into tensors and back, by the program's own ``__reduce__``: no other rank is waited for there."""

DATALOADER_WAIT_TEXT = "waits for its DataLoader"
_LOADER = "torch/utils/data/dataloader.py"
_FETCH = "torch/utils/data/_utils/fetch.py"  # in which a worker is that has something to do
_MAX_WORKERS = 3
_RPC = "torch/distributed/rpc/"
_CHILD = "waits for a process that it has started"
_MESSAGE = "waits for a message of another process"
_FUTURE = "waits for a result of its executor"
_POOL = "waits for its process pool"
_EXIT, _EXIT_QUEUE = "waits at its exit for a child process to end", "waits at its exit until its queue is read"
_LOCK_FILE = "waits for a file lock"
_WAIT_TEXTS = {
    ("multiprocessing/queues.py", "_finalize_join"): _EXIT_QUEUE,
    ("multiprocessing/util.py", "_exit_function"): _EXIT,
    ("multiprocessing/pool.py", "get"): _POOL,
    ("multiprocessing/pool.py", "next"): _POOL,
    ("multiprocessing/pool.py", "join"): _POOL,
    ("multiprocessing/queues.py", "get"): _MESSAGE,
    ("multiprocessing/connection.py", "recv"): _MESSAGE,
    ("multiprocessing/popen_fork.py", "poll"): _CHILD,
    ("concurrent/futures/_base.py", "result"): _FUTURE,
    ("concurrent/futures/_base.py", "wait"): _FUTURE,
    ("concurrent/futures/process.py", "shutdown"): _FUTURE,
    ("filelock/_api.py", "acquire"): _LOCK_FILE,  # this and the next poll, so the kernel shows no wait
    ("torch/utils/file_baton.py", "wait"): _LOCK_FILE,
    ("queue.py", "get"): "waits for a queue to fill",
    ("queue.py", "put"): "waits for room in a queue",
    ("subprocess.py", "wait"): "waits for a command to end",
    ("subprocess.py", "communicate"): "waits for a command to end",
    ("threading.py", "join"): "waits for a thread to end",
    ("threading.py", "_shutdown"): "waits for its threads to end",
    ("threading.py", "wait"): "waits for another thread",
}
"""What a rank does whose user code has called these of the standard library, or of another; the first counts."""

WAITS_FOR_CHILDREN = {DATALOADER_WAIT_TEXT, _CHILD, _MESSAGE, _FUTURE, _POOL, _EXIT, _EXIT_QUEUE}
"""Waits that processes of the rank's own may end: of these it is asked where they are."""


class DistributedCall(NamedTuple):
    """A function of torch.distributed that a thread is in."""

    function: str  # the one that the user or a library called: "all_gather_object", and not what that calls
    place: Frame | None  # the user's line


class GroupProgress(NamedTuple):
    """How far a rank is in a process group, in numbers that can be compared between ranks."""

    entered: int  # the last collective that it entered, from 1
    first_incomplete: int  # the first that it entered and has not completed; 0 for none
    collective: Collective | None  # that one or, where it has none, the last; where the rank was asked
    is_certain: bool  # whether it was asked: else sends may be in the numbers, and ``first_incomplete`` is the last that it entered


def format_line(frame: Frame) -> str:
    """Name a line: "train.py:88"."""
    return f"{frame.file}:{frame.line}"


def format_location(frame: Frame) -> str:
    """Name a line with its function, where it is in one: "load_batch at data.py:31"."""
    return format_line(frame) if frame.function == "<module>" else f"{frame.function} at {format_line(frame)}"


def user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """The user's innermost line in a stack."""
    return next((frame for frame in frames if frame.own), None)


def user_line_of(rank: RankInspection) -> Frame | None:
    """The user's line that a rank is at: of its main thread, else of the first thread that has one."""
    return next((frame for thread in rank.threads if (frame := user_frame(thread.frames))), None)


def library_calls(ranks: Iterable[RankInspection], of: Iterable[RankInspection]) -> dict[int, Frame]:
    """The calls of libraries by which ranks differ from others at the same line of the user's: for some of ``ranks``.

    It is the first that is not the same in all of them, seen from that line. A rank whose line no other shares, or
    which does the same there as all others, has none.
    """
    wanted = {each.rank: inner for each in of if (inner := _frames_from_user_line(each)) and inner[1:]}
    lines = {inner[0] for inner in wanted.values()}
    alike: dict[Frame, set[tuple[Frame, ...]]] = {line: set() for line in lines}
    for each in ranks if lines else ():
        if (inner := _frames_from_user_line(each)) and inner[0] in lines:
            alike[inner[0]].add(inner)
    depths = {line: _common_depth(list(found)) for line, found in alike.items() if len(found) > 1}
    return {rank: inner[min(depths[inner[0]], len(inner) - 1)] for rank, inner in wanted.items() if inner[0] in depths}


def _frames_from_user_line(rank: RankInspection) -> tuple[Frame, ...]:
    """The user's line that a rank is at, and the calls of libraries from there on."""
    for thread in rank.threads:
        for number, frame in enumerate(thread.frames):
            if frame.own:
                return thread.frames[number::-1]
    return ()


def _common_depth(stacks: list[tuple[Frame, ...]]) -> int:
    """How many calls stacks have in common; where all their functions are the same, how many lines."""
    functions = [[(frame.function, frame.file) for frame in stack] for stack in stacks]
    differ = any(each != functions[0] for each in functions)
    columns = zip(*(functions if differ else [[frame.line for frame in stack] for stack in stacks]), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def distributed_call_in(frames: tuple[Frame, ...]) -> DistributedCall | None:
    """The function of torch.distributed that a stack is in."""
    inside = [frame.function for frame in frames if frame.file.endswith(_C10D)]
    if not inside or not _PACKING.isdisjoint(inside):
        return None
    public = [name for name in inside if not name.startswith("_")]
    return DistributedCall((public or inside)[-1], user_frame(frames))


def distributed_call_of(rank: RankInspection) -> DistributedCall | None:
    """The function of torch.distributed that a rank is in, in any of its threads."""
    return next((call for thread in rank.threads if (call := distributed_call_in(thread.frames))), None)


def peer_of(rank: RankInspection) -> int | None:
    """The rank to which a rank sends, from which it receives, or whose lock it wants; None where that is not known."""
    call, inside = waiting_call_of(rank), rank.inside
    if call and call.function == FILE_LOCK:
        return rank.lock_holder
    known = call and inside and call.function in (inside.function, inside.operation)
    return inside.names if known and inside and call and call.function in SEND_FUNCTIONS | RECEIVE_FUNCTIONS else None


def members_of(rank: RankInspection) -> tuple[int, ...]:
    """The ranks that a rank waits for in a call that makes a group, or that is of one; () where that is not known."""
    call, inside = distributed_call_of(rank), rank.inside
    return inside.members if call and inside and inside.function == call.function else ()


def root_of(rank: RankInspection, collective: Collective) -> int | None:
    """The root of a collective that a rank waits in; None where it has none, or that is not known."""
    known = (
        rank.inside and rank.inside.operation == collective.operation in ROOTED_FUNCTIONS and not collective.completed
    )
    return rank.inside.names if known and rank.inside else None


def waiting_call_of(rank: RankInspection) -> DistributedCall | None:
    """What a rank waits for others in: a function of torch.distributed, a store, a Work's ``wait()``, a file's lock."""
    if call := distributed_call_of(rank):
        return call
    if rank.awaits == "store":
        return DistributedCall(STORE_WAIT, user_line_of(rank))
    if rank.lock_holder is not None:
        return DistributedCall(FILE_LOCK, user_line_of(rank))
    # That of a collective is in the flight recorder; without one nothing shows which it is.
    if rank.inside and rank.inside.function == "wait" and rank.answers and rank.asleep in ("", "asleep"):
        return DistributedCall(WORK_WAIT if rank.inside.names is None else rank.inside.operation, user_line_of(rank))
    return None


def may_wait(rank: RankInspection) -> bool:
    """Whether a rank may wait for others, by its own word and the kernel's, without a stack."""
    if any(each.enqueued > each.completed for each in rank.groups):
        return True
    inside = rank.inside.function if rank.inside else ""
    return inside in UNRECORDED_FUNCTIONS or waiting_call_of(rank) is not None


def thread_in(rank: RankInspection, operation: str = "") -> Thread | None:
    """The thread that runs a collective: the first that is in that function, else in any, else the main one."""
    inside = [(call, thread) for thread in rank.threads if (call := distributed_call_in(thread.frames))]
    exact = (
        thread
        for _, thread in inside
        if any(frame.function == operation and frame.file.endswith(_C10D) for frame in thread.frames)
    )
    return next(exact, inside[0][1] if inside else next(iter(rank.threads), None))


def collective_entry_line(rank: RankInspection, operation: str = "") -> Frame | None:
    """The user's line from which a rank that waits in a collective has entered it."""
    thread = thread_in(rank, operation)
    return (user_frame(thread.frames) if thread else None) or user_line_of(rank)


def describe_other_wait(rank: RankInspection) -> str:
    """What a rank waits for outside torch.distributed: "waits for its DataLoader"; "" where nothing tells."""
    frames = rank.threads[0].frames if rank.threads else ()
    called = list(takewhile(lambda frame: not frame.own, frames))
    if any(frame.file.endswith(_LOADER) for frame in called):
        return DATALOADER_WAIT_TEXT
    if any(_RPC in frame.file for frame in called):
        return "waits for an RPC"
    calls = {(frame.function, f"/{frame.file}") for frame in called}
    for (file, function), words in _WAIT_TEXTS.items():
        if any(function == name and path.endswith(f"/{file}") for name, path in calls):
            return words
    return f"waits for a reply from {rank.awaits}" if rank.awaits else rank.asleep.removeprefix("asleep")


def describe_call(rank: RankInspection, apart: Frame | None = None) -> str:
    """What a rank that does not wait for others does: "load_batch at data.py:31"; "" if unknown.

    ``apart`` is the library's call by which it differs from others at that line: "…, in download at hub/files.py:90".
    """
    line = user_line_of(rank)
    told = format_location(line) if line else ""
    if words := describe_other_wait(rank):
        workers = describe_workers(rank)
        more = f" and {len(workers) - _MAX_WORKERS} more" if len(workers) > _MAX_WORKERS else ""
        inside = f" ({'; '.join(workers[:_MAX_WORKERS])}{more})" if workers else ""
        return f"it {words}" + (f", {told}" if told else "") + inside
    return f"{told}, in {apart.function} at {_format_library_line(apart)}" if apart else told


def describe_workers(rank: RankInspection) -> list[str]:
    """Describe its child processes: "a worker: read at data.py:9", "worker pid 4711 is stopped (SIGSTOP)"."""
    name = worker_name(rank)
    gone = [
        f"{name} pid {each.pid} has ended: {format_exit(each.code)}" for each in rank.workers if each.code is not None
    ]
    gone += [f"{name} pid {each.pid} is stopped (SIGSTOP)" for each in rank.workers if each.stopped]
    busy = dict.fromkeys(f"a {name}: {_worker_location(each.frames)}" for each in busy_workers(rank))
    return [*gone, *busy]


def worker_name(rank: RankInspection) -> str:
    """Name the child processes that a rank waits for: "worker" of its DataLoader, else "child process"."""
    return "worker" if describe_other_wait(rank) == DATALOADER_WAIT_TEXT else "child process"


def busy_workers(rank: RankInspection) -> list[Worker]:
    """Those of its child processes that are not idle."""
    return [each for each in rank.workers if any(frame.own or frame.file.endswith(_FETCH) for frame in each.frames)]


def _worker_location(frames: tuple[Frame, ...]) -> str:
    own = user_frame(frames)
    return format_location(own) if own else f"{frames[0].function} at {_format_library_line(frames[0])}"


def _format_library_line(frame: Frame) -> str:
    return f"{PACKAGE_PATH.sub('', frame.file)}:{frame.line}"


def format_exit(code: int) -> str:
    """Say how a process ended: "exit code 0", "SIGKILL"."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)


def has_ended(rank: RankInspection) -> bool:
    """Whether its program is over, also where its process has yet to end (it has no frames but ours)."""
    if rank.condition in (ProcessCondition.EXITED, ProcessCondition.REPLACED):
        return True
    return (
        rank.condition is ProcessCondition.ALIVE
        and bool(rank.threads)
        and not any(each.frames for each in rank.threads)
    )


def group_progress(rank: RankInspection) -> dict[str, GroupProgress]:
    """How far a rank is in each process group that it has used, by its name.

    What torch counts as completed is a hint only: gloo's threads write it in any order, so an older collective can be
    there for ever. The entries of the flight recorder are right.
    """
    found: dict[str, GroupProgress] = {}
    for state in reversed(rank.groups):
        stuck = state.enqueued if state.enqueued > state.completed else 0
        found[state.group] = GroupProgress(state.enqueued, stuck, None, False)
    last: dict[str, list[Collective]] = {}
    for each in rank.last:
        last.setdefault(each.group, []).append(each)
    for group, of_group in last.items():
        oldest = next((each for each in of_group if not each.completed), None)
        stuck = oldest.number if oldest else 0
        found[group] = GroupProgress(of_group[-1].number, stuck, oldest or of_group[-1], True)
    return found
