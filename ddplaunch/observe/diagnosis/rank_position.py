"""The position of one rank: its line of user code, the torch function it is in, its progress in process groups."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import signal_name
from ddplaunch.observe.diagnosis.inspection import (
    Collective,
    ProcessCondition,
    RankInspection,
    Thread,
    Worker,
)

INIT_FUNCTION = "init_process_group"
SEND_FUNCTIONS = {"isend", "send", "send_object_list"}
RECEIVE_FUNCTIONS = {"irecv", "recv", "recv_object_list"}
WORK_WAIT = "the wait() of isend or irecv"
POINT_TO_POINT_FUNCTIONS = {"batch_isend_irecv", WORK_WAIT, *SEND_FUNCTIONS, *RECEIVE_FUNCTIONS}
ROOTED_FUNCTIONS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
"""Collectives with a root, which must be the same on all ranks, and the preposition before the root in a sentence."""

STORE_WAIT = "store.wait"
FILE_LOCK = "flock"
NEW_GROUP = "new_group"
RPC_CALL, RPC_WAIT, RPC_FETCH = "rpc_sync", "the wait() of rpc_async", "to_here"
RPC_CALLS = {RPC_CALL, RPC_WAIT, RPC_FETCH}
RPC_BARRIERS = {"init_rpc": "init_rpc", "shutdown": "rpc.shutdown"}  # all ranks must call them
UNRECORDED_FUNCTIONS = POINT_TO_POINT_FUNCTIONS | {
    INIT_FUNCTION,
    STORE_WAIT,
    FILE_LOCK,
    NEW_GROUP,
    *RPC_CALLS,
    *RPC_BARRIERS.values(),
    "destroy_process_group",
    "monitored_barrier",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
"""Functions that wait for other ranks but are not in gloo's flight recorder."""

PACKAGE_PATH = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+t?)/")
"""The part of a path before the name of an installed or standard module."""

_C10D = "torch/distributed/distributed_c10d.py"
_PACKING = {"_object_to_tensor", "_tensor_to_object"}
"""They pickle and unpickle objects, by the program's own ``__reduce__``; they do not wait for other ranks."""

DATALOADER_WAIT_TEXT = "waits for its DataLoader"
_LOADER = "torch/utils/data/dataloader.py"
_FETCH = "torch/utils/data/_utils/fetch.py"  # a busy worker is in it
_MAX_WORKERS = 3
_RPC = "torch/distributed/rpc/"
_RPC_WORK = "torch/distributed/rpc/internal.py"  # calls the function that another rank has requested
_CHILD = "waits for a child process"
_MESSAGE = "waits for a message from another process"
_FUTURE = "waits for a result of its executor"
_POOL = "waits for its process pool"
_EXIT, _EXIT_QUEUE = "waits at its exit for a child process to end", "waits at its exit until its queue is read"
_JOIN, _JOIN_ALL = "waits for a thread to end", "waits for its threads to end"
_THREAD, _TASK = "waits for another thread", "waits for another task"
_FILL, _SPACE = "waits for a queue to fill", "waits for space in a queue"
_LOCK = "waits for a lock"
_LOCK_FILE = "waits for a file lock"
_LOCK_PACKAGES = re.compile(r"/(?:filelock|portalocker|fasteners)/")
"""Packages with locks of files, for which they poll: the kernel shows no wait. Their own files change with versions."""

_UNLOCKS = {"release", "_release", "__exit__", "__aexit__"}
_WAIT_TEXTS = {
    ("multiprocessing/queues.py", "_finalize_join"): _EXIT_QUEUE,
    ("multiprocessing/util.py", "_exit_function"): _EXIT,
    ("multiprocessing/pool.py", "get"): _POOL,
    ("multiprocessing/pool.py", "next"): _POOL,
    ("multiprocessing/pool.py", "join"): _POOL,
    ("multiprocessing/queues.py", "get"): _MESSAGE,
    ("multiprocessing/connection.py", "recv"): _MESSAGE,
    ("multiprocessing/connection.py", "poll"): _MESSAGE,
    ("multiprocessing/popen_fork.py", "poll"): _CHILD,
    ("concurrent/futures/_base.py", "result"): _FUTURE,
    ("concurrent/futures/_base.py", "wait"): _FUTURE,
    ("concurrent/futures/process.py", "shutdown"): _FUTURE,
    ("torch/utils/file_baton.py", "wait"): _LOCK_FILE,  # it polls, as do the packages above
    ("multiprocessing/queues.py", "put"): _SPACE,
    ("multiprocessing/synchronize.py", "__enter__"): _LOCK,
    ("multiprocessing/synchronize.py", "acquire"): _LOCK,
    ("ddplaunch/runtime.py", "_wait_for_first"): "waits in runtime.local_first for the first rank of its node",
    ("queue.py", "get"): _FILL,
    ("queue.py", "put"): _SPACE,
    ("subprocess.py", "wait"): "waits for a command to end",  # asyncio's too
    ("subprocess.py", "communicate"): "waits for a command to end",
    ("threading.py", "join"): _JOIN,
    ("threading.py", "_shutdown"): _JOIN_ALL,
    ("threading.py", "wait"): _THREAD,
    ("asyncio/queues.py", "get"): _FILL,
    ("asyncio/queues.py", "put"): _SPACE,
    ("asyncio/locks.py", "wait"): _TASK,
    ("asyncio/locks.py", "acquire"): _LOCK,
    ("multiprocessing/connection.py", "wait"): _CHILD,
}
"""What a rank waits for whose user code has called one of these functions (file, name); the first match counts."""

GLOO_TEARDOWN = "waits in torch's teardown of gloo"
GLOO_DEADLOCK_TEXT = "hangs in torch's teardown of gloo, a deadlock inside torch"

_WAITS_FOR_THREADS = {_FUTURE, _JOIN, _JOIN_ALL, _THREAD, _TASK, _FILL, _SPACE}
"""Waits for a thread or task of the rank. Nothing shows which one, so all that run the program's code are named."""

WAITS_FOR_CHILDREN = {DATALOADER_WAIT_TEXT, _CHILD, _MESSAGE, _FUTURE, _POOL, _EXIT, _EXIT_QUEUE}
"""Waits for the rank's own child processes: these are inspected too."""


class DistributedCall(NamedTuple):
    """A function of torch.distributed that a thread is in."""

    function: str  # called by the user or a library: "all_gather_object", not the functions that it calls
    place: Frame | None  # the user's line


class GroupProgress(NamedTuple):
    """The progress of a rank in a process group, in numbers that can be compared between ranks."""

    entered: int  # the last collective that it entered, from 1
    first_incomplete: int  # the first that it entered and has not completed; 0 for none
    collective: Collective | None  # that one or, if there is none, the last; None if the rank was not queried
    # Whether the rank was queried. If not, sends may be counted, and ``first_incomplete`` is the last that it entered.
    is_certain: bool


def format_line(frame: Frame) -> str:
    """Format the file and line of a frame: "train.py:88"."""
    return f"{frame.file}:{frame.line}"


def format_location(frame: Frame) -> str:
    """Format the file and line of a frame, with its function if it is in one: "load_batch at data.py:31"."""
    return format_line(frame) if frame.function == "<module>" else f"{frame.function} at {format_line(frame)}"


def user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame of user code in a stack."""
    return next((frame for frame in frames if frame.own), None)


def user_line_of(rank: RankInspection) -> Frame | None:
    """Return the user's line that a rank is at: of its main thread, else of the first thread that has one."""
    return next((frame for thread in rank.threads if (frame := user_frame(thread.frames))), None)


def differing_library_calls(ranks: Iterable[RankInspection], of: Iterable[RankInspection]) -> dict[int, Frame]:
    """For each rank in ``of``, return the library call in which it differs from other ranks at the same user line.

    It is the first call, from that line inwards, that differs between ranks there. A rank that is alone at its line,
    or does the same as all others there, has none.
    """
    wanted = {each.rank: inner for each in of if (inner := _frames_from_user_line(each)) and inner[1:]}
    lines = {inner[0] for inner in wanted.values()}
    stacks: dict[Frame, set[tuple[Frame, ...]]] = {line: set() for line in lines}
    for each in ranks if lines else ():
        if (inner := _frames_from_user_line(each)) and inner[0] in lines:
            stacks[inner[0]].add(inner)
    depths = {line: _common_depth(list(found)) for line, found in stacks.items() if len(found) > 1}
    return {rank: inner[min(depths[inner[0]], len(inner) - 1)] for rank, inner in wanted.items() if inner[0] in depths}


def _frames_from_user_line(rank: RankInspection) -> tuple[Frame, ...]:
    """Return the user's line that a rank is at, and the library calls from there inwards."""
    for thread in rank.threads:
        for number, frame in enumerate(thread.frames):
            if frame.own:
                return thread.frames[number::-1]
    return ()


def _common_depth(stacks: list[tuple[Frame, ...]]) -> int:
    """Return how many outermost frames the stacks have in common: by function; if all functions are equal, by line."""
    functions = [[(frame.function, frame.file) for frame in stack] for stack in stacks]
    differ = any(each != functions[0] for each in functions)
    columns = zip(*(functions if differ else [[frame.line for frame in stack] for stack in stacks]), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def distributed_call_in(frames: tuple[Frame, ...]) -> DistributedCall | None:
    """Return the function of torch.distributed that a stack is in, or None."""
    inside = [frame.function for frame in frames if frame.file.endswith(_C10D)]
    if not inside or not _PACKING.isdisjoint(inside):
        return None
    public = [name for name in inside if not name.startswith("_")]
    return DistributedCall((public or inside)[-1], user_frame(frames))


def distributed_call_of(rank: RankInspection) -> DistributedCall | None:
    """Return the function of torch.distributed that a rank is in, in any of its threads, or None."""
    return next((call for thread in rank.threads if (call := distributed_call_in(thread.frames))), None)


def peer_of(rank: RankInspection) -> int | None:
    """Return the rank that a rank sends to or receives from, or that holds the file lock it waits for, or None."""
    call, inside = waiting_call_of(rank), rank.inside
    if call and call.function == FILE_LOCK:
        return rank.lock_holder
    known = call and inside and call.function in (inside.function, inside.operation)
    return inside.names if known and inside and call and call.function in SEND_FUNCTIONS | RECEIVE_FUNCTIONS else None


def members_of(rank: RankInspection) -> tuple[int, ...]:
    """Return the group members of a call that creates or uses a group; () if unknown."""
    call, inside = distributed_call_of(rank), rank.inside
    return inside.members if call and inside and inside.function == call.function else ()


def root_of(rank: RankInspection, collective: Collective) -> int | None:
    """Return the root of a collective that a rank waits in; None if the collective has none, or its root is unknown."""
    known = (
        rank.inside and rank.inside.operation == collective.operation in ROOTED_FUNCTIONS and not collective.completed
    )
    return rank.inside.names if known and rank.inside else None


def waiting_call_of(rank: RankInspection) -> DistributedCall | None:
    """Return the call in which a rank waits for others: torch.distributed, store, Work.wait(), file lock; or None."""
    if call := distributed_call_of(rank):
        return call
    if function := _rpc_function_of(rank):
        return DistributedCall(function, user_line_of(rank))
    if rank.inside and rank.inside.operation in ("rpc_async", RPC_FETCH) and rank.asleep in ("", "asleep"):
        return DistributedCall(RPC_FETCH if rank.inside.operation == RPC_FETCH else RPC_WAIT, user_line_of(rank))
    # The evidence is a connection to the job's store on which the main thread sleeps, or its call of a store's method.
    in_store = rank.inside and rank.inside.operation == STORE_WAIT and rank.asleep in ("", "asleep")
    if rank.awaits == "store" or in_store:
        return DistributedCall(STORE_WAIT, user_line_of(rank))
    if rank.lock_holder is not None:
        return DistributedCall(FILE_LOCK, user_line_of(rank))
    # The wait() of a collective is in the flight recorder; without a recorder nothing shows which one it is.
    if rank.inside and rank.inside.function == "wait" and rank.answers and rank.asleep in ("", "asleep"):
        return DistributedCall(WORK_WAIT if rank.inside.names is None else rank.inside.operation, user_line_of(rank))
    return None


def _rpc_function_of(rank: RankInspection) -> str:
    """Return the function of torch.distributed.rpc in which a rank's main thread waits; "" if it is in none."""
    frames = takewhile(lambda frame: not frame.own, rank.threads[0].frames if rank.threads else ())
    inside = [frame.function for frame in frames if _RPC in frame.file]
    names = {RPC_CALL: RPC_CALL, **RPC_BARRIERS}
    return next((names[each] for each in reversed(inside) if each in names), "")


def rpc_callee_line_of(rank: RankInspection) -> Frame | None:
    """Return the line of user code at which a thread of a rank executes another rank's RPC; None if none does."""
    for thread in rank.threads:
        called = list(takewhile(lambda frame: not frame.file.endswith(_RPC_WORK), thread.frames))
        if len(called) < len(thread.frames) and (line := user_frame(tuple(called))):
            return line
    return None


def is_deadlocked_in_gloo(rank: RankInspection) -> bool:
    """Whether a rank holds the GIL while it waits for a thread of gloo, which needs the GIL (``gloo_teardown.py``)."""
    return rank.answers is False and rank.asleep == GLOO_TEARDOWN


def may_wait(rank: RankInspection) -> bool:
    """Whether a rank may wait for others, judged without its stack: by its own report and that of the kernel."""
    if is_deadlocked_in_gloo(rank) or any(each.enqueued > each.completed for each in rank.groups):
        return True
    inside = rank.inside.function if rank.inside else ""
    return inside in UNRECORDED_FUNCTIONS or waiting_call_of(rank) is not None


def collective_thread(rank: RankInspection, operation: str = "") -> Thread | None:
    """Return the thread that is in function ``operation``, else one in torch.distributed, else the main thread."""
    inside = [(call, thread) for thread in rank.threads if (call := distributed_call_in(thread.frames))]
    exact = (
        thread
        for _, thread in inside
        if any(frame.function == operation and frame.file.endswith(_C10D) for frame in thread.frames)
    )
    return next(exact, inside[0][1] if inside else next(iter(rank.threads), None))


def collective_entry_line(rank: RankInspection, operation: str = "") -> Frame | None:
    """Return the user's line from which a rank has entered the collective that it waits in."""
    thread = collective_thread(rank, operation)
    return (user_frame(thread.frames) if thread else None) or user_line_of(rank)


def describe_noncollective_wait(rank: RankInspection) -> str:
    """Describe what a rank waits for outside torch.distributed: "waits for its DataLoader"; "" if unknown."""
    if is_deadlocked_in_gloo(rank):
        return GLOO_DEADLOCK_TEXT
    frames = rank.threads[0].frames if rank.threads else ()
    called = list(takewhile(lambda frame: not frame.own, frames))
    if any(frame.file.endswith(_LOADER) for frame in called):
        return DATALOADER_WAIT_TEXT
    if any(_RPC in frame.file for frame in called):
        return "waits for an RPC"
    locks = {frame.function for frame in called if _LOCK_PACKAGES.search(f"/{frame.file}")}
    if locks and locks.isdisjoint(_UNLOCKS):
        return _LOCK_FILE
    calls = {(frame.function, f"/{frame.file}") for frame in called}
    for (file, function), words in _WAIT_TEXTS.items():
        if any(function == name and path.endswith(f"/{file}") for name, path in calls):
            return words
    # A call of a lock's method, in C without a frame, in which the kernel shows that the main thread sleeps.
    if rank.inside and rank.inside.operation == "lock" and rank.asleep == "asleep":
        return _LOCK
    return f"waits for a reply from {rank.awaits}" if rank.awaits else rank.asleep.removeprefix("asleep")


def describe_rank_activity(rank: RankInspection, apart: Frame | None = None) -> str:
    """Describe what a rank does if it does not wait for other ranks: "load_batch at data.py:31"; "" if unknown.

    ``apart``: the library call in which it differs from other ranks at that line (``differing_library_calls``). It is
    added: "…, in download at hub/files.py:90".
    """
    line = user_line_of(rank)
    location = format_location(line) if line else ""
    if words := describe_noncollective_wait(rank):
        workers = [rank.thread_error] if rank.thread_error else []
        workers += describe_workers(rank)
        if words in _WAITS_FOR_THREADS:
            workers += describe_threads(rank, line)
        more = f" and {len(workers) - _MAX_WORKERS} more" if len(workers) > _MAX_WORKERS else ""
        inside = f" ({'; '.join(workers[:_MAX_WORKERS])}{more})" if workers else ""
        return f"it {words}" + (f", {location}" if location else "") + inside
    return f"{location}, in {apart.function} at {_format_library_line(apart)}" if apart else location


def may_wait_for_thread(rank: RankInspection) -> bool:
    """Whether a rank may be waiting for another of its own threads; a thread that has failed cannot end the wait."""
    return describe_noncollective_wait(rank) in {*_WAITS_FOR_THREADS, _LOCK}


def describe_workers(rank: RankInspection) -> list[str]:
    """Describe a rank's child processes: "a worker: read at data.py:9", "worker pid 4711 is stopped (SIGSTOP)"."""
    name = worker_noun(rank)
    gone = [
        f"{name} pid {each.pid} has ended: {format_exit(each.code)}" for each in rank.workers if each.code is not None
    ]
    gone += [f"{name} pid {each.pid} is stopped (SIGSTOP)" for each in rank.workers if each.stopped]
    busy = dict.fromkeys(f"a {name}: {_format_worker_location(each.frames)}" for each in busy_workers(rank))
    return [*gone, *busy]


def describe_threads(rank: RankInspection, line: Frame | None) -> list[str]:
    """Describe a rank's threads and tasks except the main thread: "another thread: upload at train.py:31"."""
    places: dict[str, None] = {}
    for each in rank.threads[1:]:
        if (at := user_frame(each.frames)) and at != line:
            places[f"another {each.title.partition(' ')[0]}: {format_location(at)}"] = None
    return list(places)


def worker_noun(rank: RankInspection) -> str:
    """Return the noun for the child processes that a rank waits for: "worker" (DataLoader) or "child process"."""
    return "worker" if describe_noncollective_wait(rank) == DATALOADER_WAIT_TEXT else "child process"


def busy_workers(rank: RankInspection) -> list[Worker]:
    """Return the child processes of a rank that are not idle."""
    return [each for each in rank.workers if any(frame.own or frame.file.endswith(_FETCH) for frame in each.frames)]


def _format_worker_location(frames: tuple[Frame, ...]) -> str:
    own, call = user_frame(frames), distributed_call_in(frames)
    if own and call:
        return f"{format_location(own)}, in {call.function}"
    return format_location(own) if own else f"{frames[0].function} at {_format_library_line(frames[0])}"


def _format_library_line(frame: Frame) -> str:
    return f"{PACKAGE_PATH.sub('', frame.file)}:{frame.line}"


def format_exit(code: int) -> str:
    """Describe how a process ended: "exit code 0", "SIGKILL"."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)


def has_ended(rank: RankInspection) -> bool:
    """Whether a rank's program has ended; its process may still run, with frames of ddplaunch only."""
    if rank.condition in (ProcessCondition.EXITED, ProcessCondition.REPLACED):
        return True
    return (
        rank.condition is ProcessCondition.ALIVE
        and bool(rank.threads)
        and not any(each.frames for each in rank.threads)
        and not rank.outside
    )


def runs_program(rank: RankInspection) -> bool:
    """Whether a rank runs the user's program: it has not ended, and is not between two calls of a session."""
    return not has_ended(rank) and not rank.outside


def group_progress(rank: RankInspection) -> dict[str, GroupProgress]:
    """Return the progress of a rank in each process group that it has used, by torch's name of the group.

    torch's counter of completed operations is only a hint: gloo's threads write it in any order, so it can stay at an
    older collective for ever. The entries of the flight recorder are exact.
    """
    progress: dict[str, GroupProgress] = {}
    for state in reversed(rank.groups):
        stuck = state.enqueued if state.enqueued > state.completed else 0
        progress[state.group] = GroupProgress(state.enqueued, stuck, None, False)
    last: dict[str, list[Collective]] = {}
    for each in rank.last:
        last.setdefault(each.group, []).append(each)
    for group, of_group in last.items():
        oldest = next((each for each in of_group if not each.completed), None)
        stuck = oldest.number if oldest else 0
        progress[group] = GroupProgress(of_group[-1].number, stuck, oldest or of_group[-1], True)
    return progress
